// What TensorRT finds in the library: getCreators and setLoggerFinder.
#include "plugin.h"

#include <cstdio>
#include <cstring>

namespace furcate
{
using namespace nvinfer1;

namespace
{

bool read(PluginField const& field, double& value)
{
    switch (field.type)
    {
    case PluginFieldType::kINT32: value = *static_cast<std::int32_t const*>(field.data); return true;
    case PluginFieldType::kINT64: value = static_cast<double>(*static_cast<std::int64_t const*>(field.data)); return true;
    case PluginFieldType::kFLOAT32: value = *static_cast<float const*>(field.data); return true;
    case PluginFieldType::kFLOAT64: value = *static_cast<double const*>(field.data); return true;
    default: return false;
    }
}

class Creator final : public IPluginCreatorV3One
{
public:
    explicit Creator(Kind kind)
        : mKind(kind)
        , mSpecification(kSPECIFICATIONS[kind])
    {
        for (std::int32_t i = 0; i < mSpecification.numAttributes; ++i)
        {
            AttributeEntry const& attribute = mSpecification.attributes[i];
            mFields.emplace_back(
                attribute.name, nullptr, attribute.isFloat ? PluginFieldType::kFLOAT64 : PluginFieldType::kINT64, 1);
        }
        mCollection = PluginFieldCollection{static_cast<std::int32_t>(mFields.size()), mFields.data()};
    }

    IPluginV3* createPlugin(char const*, PluginFieldCollection const* fields, TensorRTPhase) noexcept override
    {
        std::vector<double> values;
        for (std::int32_t i = 0; i < mSpecification.numAttributes; ++i)
        {
            char const* const name = mSpecification.attributes[i].name;
            bool isFound = false;
            double value = 0.0;
            for (std::int32_t f = 0; f < fields->nbFields && !isFound; ++f)
            {
                isFound = std::strcmp(fields->fields[f].name, name) == 0 && read(fields->fields[f], value);
            }
            if (!isFound)
            {
                std::fprintf(stderr, "furcate: %s needs the attribute %s\n", mSpecification.name, name);
                return nullptr;
            }
            values.push_back(value);
        }
        return new Plugin(mKind, std::move(values));
    }

    PluginFieldCollection const* getFieldNames() noexcept override
    {
        return &mCollection;
    }

    char const* getPluginName() const noexcept override
    {
        return mSpecification.name;
    }

    char const* getPluginVersion() const noexcept override
    {
        return "1";
    }

    char const* getPluginNamespace() const noexcept override
    {
        return "furcate";
    }

private:
    Kind mKind;
    Specification const& mSpecification;
    std::vector<PluginField> mFields;
    PluginFieldCollection mCollection{};
};

} // namespace
} // namespace furcate

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(std::int32_t& count)
{
    static furcate::Creator split(furcate::kSPLIT);
    static furcate::Creator reduce(furcate::kREDUCE);
    static furcate::Creator commit(furcate::kCOMMIT);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&split, &reduce, &commit};
    count = 3;
    return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
