#include "geometry.h"

namespace furcate
{
using namespace nvinfer1;

namespace
{

// Positions of the inputs that sizes are read from; test_native.py holds them against the specification.
constexpr std::int32_t kSPLIT_QKV = 0;
constexpr std::int32_t kSPLIT_TREE_MASK = 2;
constexpr std::int32_t kSPLIT_PAGE_TABLE = 5;
constexpr std::int32_t kREDUCE_QKV = 2;
constexpr std::int32_t kCOMMIT_PAGE_TABLE = 0;
constexpr std::int32_t kCOMMIT_CACHE_LENGTHS = 1;
constexpr std::int32_t kCOMMIT_PATH_NODES = 2;
constexpr std::int32_t kCOMMIT_POOL = 4;

std::int32_t integer(Attributes const& attribute, char const* name)
{
    return static_cast<std::int32_t>(attribute(name));
}

std::int32_t size(PluginTensorDesc const* inputs, std::int32_t input, std::int32_t axis)
{
    return static_cast<std::int32_t>(inputs[input].dims.d[axis]);
}

std::int32_t ceilDivide(std::int32_t a, std::int32_t b)
{
    return (a + b - 1) / b;
}

std::int32_t groupSize(Attributes const& attribute)
{
    return integer(attribute, "num_query_heads") / integer(attribute, "num_kv_heads");
}

} // namespace

void outputShapes(
    Kind kind, DimsExprs const* inputs, DimsExprs* outputs, IExprBuilder& builder, Attributes const& attribute)
{
    auto const times = [&builder](IDimensionExpr const* a, std::int32_t b)
    { return builder.operation(DimensionOperation::kPROD, *a, *builder.constant(b)); };
    if (kind == kCOMMIT)
    {
        outputs[0].nbDims = 1;
        outputs[0].d[0] = inputs[kCOMMIT_CACHE_LENGTHS].d[0];
        return;
    }
    IDimensionExpr const* const* const qkv = inputs[kind == kSPLIT ? kSPLIT_QKV : kREDUCE_QKV].d;
    std::int32_t const headDim = integer(attribute, "head_dim");
    if (kind == kREDUCE)
    {
        outputs[0].nbDims = 3;
        outputs[0].d[0] = qkv[0];
        outputs[0].d[1] = qkv[1];
        outputs[0].d[2] = builder.constant(integer(attribute, "num_query_heads") * headDim);
        return;
    }
    for (std::int32_t i = 0; i < 2; ++i)
    {
        outputs[i].nbDims = 4;
        outputs[i].d[0] = times(qkv[0], integer(attribute, "num_kv_heads"));
        outputs[i].d[1] = builder.constant(integer(attribute, "num_splits"));
        outputs[i].d[2] = times(qkv[1], groupSize(attribute));
        outputs[i].d[3] = builder.constant(i == 0 ? headDim : 2);
    }
}

std::int32_t rowsOf(Kind kind, PluginTensorDesc const* inputs, Attributes const& attribute)
{
    switch (kind)
    {
    case kSPLIT: return size(inputs, kSPLIT_QKV, 1) * groupSize(attribute);
    case kREDUCE: return size(inputs, kREDUCE_QKV, 1) * groupSize(attribute);
    case kCOMMIT: break;
    }
    return size(inputs, kCOMMIT_PATH_NODES, 1);
}

Launch launchOf(Kind kind, Kernel const& kernel, PluginTensorDesc const* inputs, Attributes const& attribute)
{
    auto const grid = [](std::int32_t x, std::int32_t y, std::int32_t z)
    { return Grid{static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)}; };
    std::int32_t const rows = rowsOf(kind, inputs, attribute);
    std::int32_t const kvHeads = integer(attribute, "num_kv_heads");
    if (kind == kCOMMIT)
    {
        std::int32_t const slices = ceilDivide(kvHeads * integer(attribute, "head_dim"), kernel.blockSize);
        return {grid(slices, 2 * size(inputs, kCOMMIT_POOL, 0), size(inputs, kCOMMIT_CACHE_LENGTHS, 0)),
            {size(inputs, kCOMMIT_PAGE_TABLE, 1), rows}};
    }
    std::int32_t const splits = integer(attribute, "num_splits");
    if (kind == kREDUCE)
    {
        return {grid(rows, size(inputs, kREDUCE_QKV, 0) * kvHeads, 1), {size(inputs, kREDUCE_QKV, 1), splits}};
    }
    std::int32_t const nodeOffset = 0;
    return {grid(ceilDivide(rows, kernel.blockSize), splits, size(inputs, kSPLIT_QKV, 0) * kvHeads),
        {integer(attribute, "layer"), size(inputs, kSPLIT_QKV, 1), size(inputs, kSPLIT_TREE_MASK, 2),
            size(inputs, kSPLIT_PAGE_TABLE, 1), splits, nodeOffset}};
}

} // namespace furcate
