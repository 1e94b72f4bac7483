#include "plugin.h"

#include "driver.h"
#include "geometry.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace furcate
{
using namespace nvinfer1;

Plugin::Plugin(Kind kind, std::vector<double> values)
    : mKind(kind)
    , mSpecification(kSPECIFICATIONS[kind])
    , mValues(std::move(values))
    , mIntegers(mValues.begin(), mValues.end())
{
    for (std::int32_t i = 0; i < mSpecification.numAttributes; ++i)
    {
        AttributeEntry const& attribute = mSpecification.attributes[i];
        void const* const data = attribute.isFloat ? static_cast<void const*>(&mValues[i]) : &mIntegers[i];
        mFields.emplace_back(
            attribute.name, data, attribute.isFloat ? PluginFieldType::kFLOAT64 : PluginFieldType::kINT64, 1);
    }
    mCollection = PluginFieldCollection{static_cast<std::int32_t>(mFields.size()), mFields.data()};
}

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* Plugin::clone() noexcept
{
    return new Plugin(mKind, mValues);
}

char const* Plugin::getPluginName() const noexcept
{
    return mSpecification.name;
}

char const* Plugin::getPluginVersion() const noexcept
{
    return "1";
}

char const* Plugin::getPluginNamespace() const noexcept
{
    return "furcate";
}

std::int32_t Plugin::configurePlugin(
    DynamicPluginTensorDesc const*, std::int32_t, DynamicPluginTensorDesc const*, std::int32_t) noexcept
{
    return 0;
}

std::int32_t Plugin::getOutputDataTypes(
    DataType* types, std::int32_t numOutputs, DataType const* inputTypes, std::int32_t) const noexcept
{
    for (std::int32_t i = 0; i < numOutputs; ++i)
    {
        switch (mSpecification.outputs[i].type)
        {
        case Type::kACTIVATION: types[i] = inputTypes[activation()]; break;
        case Type::kFLOAT32: types[i] = DataType::kFLOAT; break;
        case Type::kINT32: types[i] = DataType::kINT32; break;
        case Type::kINT64: types[i] = DataType::kINT64; break;
        }
    }
    return 0;
}

std::int32_t Plugin::getOutputShapes(DimsExprs const* inputs, std::int32_t, DimsExprs const*, std::int32_t,
    DimsExprs* outputs, std::int32_t, IExprBuilder& builder) noexcept
{
    outputShapes(mKind, inputs, outputs, builder, [this](char const* name) { return attribute(name); });
    return 0;
}

bool Plugin::supportsFormatCombination(
    std::int32_t position, DynamicPluginTensorDesc const* tensors, std::int32_t, std::int32_t) noexcept
{
    PluginTensorDesc const& tensor = tensors[position].desc;
    if (tensor.format != TensorFormat::kLINEAR)
    {
        return false;
    }
    switch (entry(position).type)
    {
    case Type::kFLOAT32: return tensor.type == DataType::kFLOAT;
    case Type::kINT32: return tensor.type == DataType::kINT32;
    case Type::kINT64: return tensor.type == DataType::kINT64;
    case Type::kACTIVATION: break;
    }
    bool const isSixteenBits = tensor.type == DataType::kHALF || tensor.type == DataType::kBF16;
    return isSixteenBits && tensor.type == tensors[activation()].desc.type;
}

std::int32_t Plugin::getNbOutputs() const noexcept
{
    return mSpecification.numOutputs;
}

std::int32_t Plugin::enqueue(PluginTensorDesc const* inputDescs, PluginTensorDesc const*, void const* const* inputs,
    void* const* outputs, void*, cudaStream_t stream) noexcept
{
    auto const lookUp = [this](char const* name) { return attribute(name); };
    std::int32_t const activationInput = activation();
    bool const isBfloat16 = activationInput >= 0 && inputDescs[activationInput].type == DataType::kBF16;
    Kernel const* const kernel = choose(rowsOf(mKind, inputDescs, lookUp), isBfloat16);
    if (kernel == nullptr)
    {
        std::fprintf(stderr,
            "furcate: no kernel of %s in this library fits sm_%d and the plugin's attributes; build it with "
            "plugins/native/build.py for this model and GPU\n",
            mSpecification.name, currentArch());
        return 1;
    }
    Launch launched = launchOf(mKind, *kernel, inputDescs, lookUp);
    std::vector<void*> arguments;
    for (std::int32_t i = 0; i < mSpecification.numInputs; ++i)
    {
        arguments.push_back(const_cast<void**>(const_cast<void* const*>(reinterpret_cast<void const* const*>(&inputs[i]))));
    }
    for (std::int32_t& scalar : launched.scalars)
    {
        arguments.push_back(&scalar);
    }
    for (std::int32_t i = 0; i < mSpecification.numOutputs; ++i)
    {
        arguments.push_back(const_cast<void**>(&outputs[i]));
    }
    void* hidden = nullptr;
    arguments.insert(arguments.end(), kNUM_HIDDEN_ARGUMENTS, &hidden);
    return launch(*kernel, launched.grid, arguments.data(), stream);
}

std::int32_t Plugin::onShapeChange(
    PluginTensorDesc const*, std::int32_t, PluginTensorDesc const*, std::int32_t) noexcept
{
    return 0;
}

std::int32_t Plugin::setTactic(std::int32_t) noexcept
{
    return 0;
}

IPluginV3* Plugin::attachToContext(IPluginResourceContext*) noexcept
{
    return clone();
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept
{
    return &mCollection;
}

TensorEntry const& Plugin::entry(std::int32_t position) const
{
    bool const isInput = position < mSpecification.numInputs;
    return isInput ? mSpecification.inputs[position] : mSpecification.outputs[position - mSpecification.numInputs];
}

// The first input of the activations' type, or -1.
std::int32_t Plugin::activation() const
{
    for (std::int32_t i = 0; i < mSpecification.numInputs; ++i)
    {
        if (mSpecification.inputs[i].type == Type::kACTIVATION)
        {
            return i;
        }
    }
    return -1;
}

// The kernel of the fewest rows that still holds them, for this GPU and these attributes.
Kernel const* Plugin::choose(std::int32_t rows, bool isBfloat16) const
{
    std::int32_t const arch = currentArch();
    Kernel const* best = nullptr;
    for (std::int32_t k = 0; k < kNUM_KERNELS; ++k)
    {
        Kernel const& kernel = kKERNELS[k];
        bool isFit = kernel.kind == mKind && kernel.arch == arch && rows <= kernel.maxRows
            && (activation() < 0 || kernel.isBfloat16 == isBfloat16);
        for (std::int32_t i = 0; isFit && i < mSpecification.numAttributes; ++i)
        {
            double const wanted = kernel.attributes[i];
            isFit = std::isnan(wanted) || std::abs(wanted - mValues[i]) <= 1e-6 * std::abs(wanted);
        }
        if (isFit && (best == nullptr || kernel.maxRows < best->maxRows))
        {
            best = &kernel;
        }
    }
    return best;
}

double Plugin::attribute(char const* name) const
{
    for (std::int32_t i = 0; i < mSpecification.numAttributes; ++i)
    {
        if (std::strcmp(mSpecification.attributes[i].name, name) == 0)
        {
            return mValues[i];
        }
    }
    return 0.0;
}

} // namespace furcate
