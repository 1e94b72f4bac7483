// What the generated tables hold: the plugins of plugins/specification.py, and the kernels compiled for them.
#pragma once

#include <cstdint>

namespace furcate
{

enum class Type : std::int32_t
{
    kACTIVATION, // float16 or bfloat16, the same for all such tensors of a plugin
    kFLOAT32,
    kINT32,
    kINT64,
};

struct TensorEntry
{
    char const* name;
    Type type;
    std::int32_t rank;
};

struct AttributeEntry
{
    char const* name;
    bool isFloat;
};

struct Specification
{
    char const* name;
    TensorEntry const* inputs;
    std::int32_t numInputs;
    TensorEntry const* outputs;
    std::int32_t numOutputs;
    AttributeEntry const* attributes;
    std::int32_t numAttributes;
    std::int32_t numScalars;
};

// Order of kSPECIFICATIONS.
enum Kind : std::int32_t
{
    kSPLIT,
    kREDUCE,
    kCOMMIT,
};

struct Kernel
{
    Kind kind;
    std::int32_t arch;
    bool isBfloat16;         // not looked at where the plugin has no activations
    std::int32_t maxRows;    // rows of one (sequence, KV head) it is meant for
    std::int32_t blockSize;  // rows of a block (split) or columns of a slice (commit)
    std::int32_t numThreads;
    std::int32_t sharedBytes;
    char const* name;
    unsigned char const* cubin;
    double const* attributes; // in the specification's order; NaN: any value
};

extern Specification const kSPECIFICATIONS[];
extern Kernel const kKERNELS[];
extern std::int32_t const kNUM_SPECIFICATIONS;
extern std::int32_t const kNUM_KERNELS;

// Hidden arguments that Triton appends to every kernel: scratch memory that none of these kernels uses.
constexpr std::int32_t kNUM_HIDDEN_ARGUMENTS = 2;

} // namespace furcate
