// Shapes, grids and scalars of each plugin: the same as in plugin.py of tree_attention and cache_commit.
#pragma once

#include "driver.h"
#include "specification.h"

#include <NvInferRuntime.h>
#include <functional>
#include <vector>

namespace furcate
{

using Attributes = std::function<double(char const*)>;

struct Launch
{
    Grid grid;
    std::vector<std::int32_t> scalars;
};

void outputShapes(Kind kind, nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
    nvinfer1::IExprBuilder& builder, Attributes const& attribute);

// What a kernel is chosen by: rows of one (sequence, KV head), path entries for the commit.
std::int32_t rowsOf(Kind kind, nvinfer1::PluginTensorDesc const* inputs, Attributes const& attribute);

Launch launchOf(
    Kind kind, Kernel const& kernel, nvinfer1::PluginTensorDesc const* inputs, Attributes const& attribute);

} // namespace furcate
