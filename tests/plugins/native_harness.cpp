// Loads the plugin library as TensorRT does, asks every plugin all that a build and an inference ask, prints JSON lines.
// Usage: native_harness library B N W P A L attribute=value ...
#include <NvInferRuntime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <string>
#include <vector>

using namespace nvinfer1;


struct NumberImpl final : apiv::VDimensionExpr
{
    std::int64_t value;
    explicit NumberImpl(std::int64_t v) : value(v) {}
    bool isConstant() const override { return true; }
    std::int64_t getConstantValue() const override { return value; }
    bool isSizeTensor() const override { return false; }
};

struct Number final : IDimensionExpr
{
    explicit Number(std::int64_t value) { mImpl = new NumberImpl(value); }
};

struct BuilderImpl final : apiv::VExprBuilder
{
    IDimensionExpr const* constant(std::int64_t value) override { return new Number(value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a, IDimensionExpr const& b) override
    {
        if (op != DimensionOperation::kPROD) { std::abort(); }
        return new Number(a.getConstantValue() * b.getConstantValue());
    }
    IDimensionExpr const* declareSizeTensor(std::int32_t, IDimensionExpr const&, IDimensionExpr const&) override { std::abort(); }
};

struct Builder final : IExprBuilder
{
    Builder() { mImpl = new BuilderImpl; }
};

struct StubLaunch { unsigned grid[3], threads, sharedBytes; int limit; char const* name; };

// Shapes of the inputs, by plugin, from B N W P A L and the attributes.
std::vector<std::vector<std::int64_t>> inputShapes(std::string const& name, std::int64_t const* s, std::map<std::string, double> const& a)
{
    auto const at = [&a](char const* key) { return static_cast<std::int64_t>(a.at(key)); };
    std::int64_t const b = s[0], n = s[1], hq = at("num_query_heads"), hkv = at("num_kv_heads"), d = at("head_dim");
    std::vector<std::int64_t> const qkv{b, n, (hq + 2 * hkv) * d};
    if (name == "tree_attention_split")
        return {qkv, {b, n}, {b, n, s[2]}, {b}, {b}, {b, s[3]}, {4096, d / 2}, {4096, d / 2}, {d}, {d}, {2}, {s[5]}};
    if (name == "tree_attention_reduce")
        return {{b * hkv, at("num_splits"), n * hq / hkv, d}, {b * hkv, at("num_splits"), n * hq / hkv, 2}, qkv};
    return {{b, s[3]}, {b}, {b, s[4]}, {b}, {s[5]}};
}

DataType typeFor(IPluginV3OneBuild& build, std::int32_t position, std::vector<DynamicPluginTensorDesc>& all, std::int32_t numInputs)
{
    for (DataType const type : {DataType::kBF16, DataType::kFLOAT, DataType::kINT32, DataType::kINT64})
    {
        all[position].desc.type = type;
        if (build.supportsFormatCombination(position, all.data(), numInputs, all.size() - numInputs)) { return type; }
    }
    std::abort();
}

int main(int count, char** words)
{
    void* const library = dlopen(words[1], RTLD_NOW);
    if (library == nullptr) { std::fprintf(stderr, "%s\n", dlerror()); return 1; }
    auto const getCreators = reinterpret_cast<IPluginCreatorInterface* const* (*)(std::int32_t&)>(dlsym(library, "getCreators"));
    std::int64_t sizes[6];
    for (int i = 0; i < 6; ++i) { sizes[i] = std::atoll(words[2 + i]); }
    std::map<std::string, double> given;
    for (int i = 8; i < count; ++i)
    {
        std::string const word = words[i];
        given[word.substr(0, word.find('='))] = std::atof(word.c_str() + word.find('=') + 1);
    }
    std::int32_t numCreators{};
    auto const creators = getCreators(numCreators);
    for (std::int32_t c = 0; c < numCreators; ++c)
    {
        auto* const creator = static_cast<IPluginCreatorV3One*>(creators[c]);
        auto const* const names = creator->getFieldNames();
        std::vector<double> floats(names->nbFields);
        std::vector<std::int64_t> integers(names->nbFields);
        std::vector<PluginField> fields;
        std::printf("{\"name\": \"%s\", \"namespace\": \"%s\", \"attributes\": {", creator->getPluginName(), creator->getPluginNamespace());
        for (std::int32_t i = 0; i < names->nbFields; ++i)
        {
            PluginField const& field = names->fields[i];
            bool const isFloat = field.type == PluginFieldType::kFLOAT64;
            floats[i] = given.at(field.name);
            integers[i] = static_cast<std::int64_t>(floats[i]);
            fields.emplace_back(field.name, isFloat ? static_cast<void*>(&floats[i]) : &integers[i], field.type, 1);
            std::printf("%s\"%s\": \"%s\"", i ? ", " : "", field.name, isFloat ? "float" : "int");
        }
        PluginFieldCollection collection{names->nbFields, fields.data()};
        IPluginV3* const first = creator->createPlugin("p", &collection, TensorRTPhase::kBUILD);
        // What an engine stores must make the same plugin again.
        auto* const stored = static_cast<IPluginV3OneRuntime*>(first->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
        IPluginV3* const plugin = creator->createPlugin("p", stored->getFieldsToSerialize(), TensorRTPhase::kRUNTIME)->clone();
        auto& build = *static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
        auto& runtime = *static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));

        auto const shapes = inputShapes(creator->getPluginName(), sizes, given);
        std::int32_t const numInputs = shapes.size(), numOutputs = build.getNbOutputs();
        std::vector<DynamicPluginTensorDesc> all(numInputs + numOutputs);
        std::vector<DimsExprs> inputs(numInputs), outputs(numOutputs);
        for (std::int32_t i = 0; i < numInputs; ++i)
        {
            inputs[i].nbDims = all[i].desc.dims.nbDims = shapes[i].size();
            for (std::size_t j = 0; j < shapes[i].size(); ++j)
            {
                inputs[i].d[j] = new Number(shapes[i][j]);
                all[i].desc.dims.d[j] = shapes[i][j];
            }
        }
        // The activations' type is that of the first such input: settle it before the others are asked.
        for (auto& tensor : all) { tensor.desc.format = TensorFormat::kLINEAR; tensor.desc.type = DataType::kBF16; }
        std::vector<DataType> types;
        for (std::int32_t i = 0; i < numInputs + numOutputs; ++i)
        {
            std::vector<DynamicPluginTensorDesc> trial = all;
            types.push_back(typeFor(build, i, trial, numInputs));
        }
        for (std::size_t i = 0; i < all.size(); ++i) { all[i].desc.type = types[i]; }
        std::vector<DataType> declared(numOutputs);
        build.getOutputDataTypes(declared.data(), numOutputs, types.data(), numInputs);
        Builder builder;
        build.getOutputShapes(inputs.data(), numInputs, nullptr, 0, outputs.data(), numOutputs, builder);
        std::printf("}, \"types\": [");
        for (std::size_t i = 0; i < types.size(); ++i) { std::printf("%s%d", i ? ", " : "", static_cast<int>(types[i])); }
        std::printf("], \"declared\": [");
        for (std::int32_t i = 0; i < numOutputs; ++i) { std::printf("%s%d", i ? ", " : "", static_cast<int>(declared[i])); }
        std::printf("], \"shapes\": [");
        for (std::int32_t i = 0; i < numOutputs; ++i)
        {
            std::printf("%s[", i ? ", " : "");
            for (std::int32_t j = 0; j < outputs[i].nbDims; ++j) { std::printf("%s%lld", j ? ", " : "", static_cast<long long>(outputs[i].d[j]->getConstantValue())); }
            std::printf("]");
        }

        std::vector<PluginTensorDesc> descs;
        for (auto const& tensor : all) { descs.push_back(tensor.desc); }
        std::vector<char> memory(numInputs + numOutputs);
        std::vector<void const*> in;
        std::vector<void*> out;
        for (std::int32_t i = 0; i < numInputs; ++i) { in.push_back(&memory[i]); }
        for (std::int32_t i = 0; i < numOutputs; ++i) { out.push_back(&memory[numInputs + i]); }
        void* const cuda = dlopen("libcuda.so.1", RTLD_NOW);
        std::int32_t const numScalars = std::strcmp(creator->getPluginName(), "tree_attention_split") == 0 ? 6 : 2;
        std::int32_t const numArguments = numInputs + numScalars + numOutputs + 2;
        if (cuda != nullptr) { *static_cast<int*>(dlsym(cuda, "stubNumArguments")) = numArguments; }
        std::int32_t const code = runtime.enqueue(descs.data(), descs.data() + numInputs, in.data(), out.data(), nullptr, nullptr);
        std::printf("], \"code\": %d", code);
        if (code == 0)
        {
            auto const& launch = *static_cast<StubLaunch*>(dlsym(cuda, "stubLastLaunch"));
            std::printf(", \"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"threads\": %u, \"shared_bytes\": %u, \"limit\": %d", launch.name,
                launch.grid[0], launch.grid[1], launch.grid[2], launch.threads, launch.sharedBytes, launch.limit);
            int const* const arguments = static_cast<int*>(dlsym(cuda, "stubArguments"));
            std::printf(", \"scalars\": [");
            for (std::int32_t i = 0; i < numScalars; ++i) { std::printf("%s%d", i ? ", " : "", arguments[numInputs + i]); }
            // Pointers of inputs and outputs are those handed over, in order; the hidden ones are null.
            bool isInOrder = true;
            auto const low = [](void const* pointer) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(pointer)); };
            for (std::int32_t i = 0; i < numInputs; ++i) { isInOrder = isInOrder && arguments[i] == low(in[i]); }
            for (std::int32_t i = 0; i < numOutputs; ++i) { isInOrder = isInOrder && arguments[numInputs + numScalars + i] == low(out[i]); }
            isInOrder = isInOrder && arguments[numArguments - 2] == 0 && arguments[numArguments - 1] == 0;
            std::printf("], \"pointers_in_order\": %s", isInOrder ? "true" : "false");
        }
        std::printf("}\n");
    }
    return 0;
}
