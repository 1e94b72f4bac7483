// One IPluginV3 class for the three plugins; the specification says what differs.
#pragma once

#include "specification.h"

#include <NvInferRuntime.h>
#include <vector>

namespace furcate
{

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime
{
public:
    // `values` are the attributes in the specification's order.
    Plugin(Kind kind, std::vector<double> values);

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

    std::int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* inputs, std::int32_t numInputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept override;
    std::int32_t getOutputDataTypes(nvinfer1::DataType* types, std::int32_t numOutputs,
        nvinfer1::DataType const* inputTypes, std::int32_t numInputs) const noexcept override;
    std::int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, std::int32_t numInputs,
        nvinfer1::DimsExprs const* shapeInputs, std::int32_t numShapeInputs, nvinfer1::DimsExprs* outputs,
        std::int32_t numOutputs, nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(std::int32_t position, nvinfer1::DynamicPluginTensorDesc const* tensors,
        std::int32_t numInputs, std::int32_t numOutputs) noexcept override;
    std::int32_t getNbOutputs() const noexcept override;

    std::int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDescs, nvinfer1::PluginTensorDesc const* outputDescs,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    std::int32_t onShapeChange(nvinfer1::PluginTensorDesc const* inputs, std::int32_t numInputs,
        nvinfer1::PluginTensorDesc const* outputs, std::int32_t numOutputs) noexcept override;
    std::int32_t setTactic(std::int32_t tactic) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    TensorEntry const& entry(std::int32_t position) const;
    std::int32_t activation() const;
    Kernel const* choose(std::int32_t rows, bool isBfloat16) const;
    double attribute(char const* name) const;

    Kind mKind;
    Specification const& mSpecification;
    std::vector<double> mValues;
    std::vector<std::int64_t> mIntegers; // what the serialized fields point at
    std::vector<nvinfer1::PluginField> mFields;
    nvinfer1::PluginFieldCollection mCollection{};
};

} // namespace furcate
