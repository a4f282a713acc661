// The part of ONNX Runtime's C interface that custom operators need, as numbers and types of its binary interface.
//
// ONNX Runtime appends to its table of functions and never moves one, so a place in the table is a promise (its own
// static_asserts hold it). No header of ONNX Runtime comes with its Python package; this file takes its place.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtTensorTypeAndShapeInfo;
struct OrtCustomOp;
struct OrtApi;

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

enum { kFloat = 1, kRequired = 0, kOptional = 1, kOrtFail = 1, kOrtInvalidArgument = 2 };

struct OrtCustomOp {  // as of version 18
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
}

namespace ort {

constexpr uint32_t kApiVersion = 18;  // the first in which a custom operator may write where its input lies
constexpr uint32_t kOpVersion = 18;

// Places in the table of functions.
enum Place {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorShapeElementCount = 64,
  kGetTensorTypeAndShape = 65,
  kGetAttributeFloat = 85,
  kGetInputCount = 88,
  kGetInput = 90,
  kGetOutput = 91,
  kReleaseTensorTypeAndShapeInfo = 99,
  kGetAttributeInts = 163,
  kParallelFor = 274,
};

template <typename... Arguments>
inline OrtStatus* call(const OrtApi* api, Place place, Arguments... arguments) {
  using Function = OrtStatus* (*)(Arguments...);
  return reinterpret_cast<Function const*>(api)[place](arguments...);
}

}  // namespace ort
