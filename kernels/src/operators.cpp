// The loops as operators of ONNX Runtime, in the domain `protofleet.kernels`.
//
// Each operator takes its sizes as integers in the attribute `sizes`, in the order of the structures in loops.h. A tensor
// that does not have that many numbers is refused: a graph comes from a bundle, and may be wrong. Threads are those of
// the session.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "loops.h"
#include "ort_abi.h"

namespace {

const OrtApi* api = nullptr;

OrtStatus* failure(const char* text) {
  using Create = OrtStatus* (*)(int, const char*);
  return reinterpret_cast<Create const*>(api)[ort::kCreateStatus](kOrtInvalidArgument, text);
}

constexpr int kMostInputs = 8, kMostOutputs = 4;

struct Run {  // of one operator, once
  OrtKernelContext* context;
  const float* in[kMostInputs] = {};
  size_t in_size[kMostInputs] = {};
  float* out[kMostOutputs] = {};
};

void run_parallel(void* runner, void (*body)(void*, size_t), size_t count, void* context) {
  ort::call<const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>(
      api, ort::kParallelFor, static_cast<const OrtKernelContext*>(runner), body, count, 0, context);
}

struct Shape {
  int64_t dims[5];
  size_t rank;
  size_t size() const {
    size_t n = 1;
    for (size_t i = 0; i < rank; ++i) n *= size_t(dims[i]);
    return n;
  }
};

Shape blocked(int64_t batch, int64_t blocks, int64_t height, int64_t width) {
  return {{batch, blocks, height, width, PF_LANES}, 5};
}
Shape planes(int64_t batch, int64_t channels, int64_t height, int64_t width) {
  return {{batch, channels, height, width, 0}, 4};
}
Shape vector_of(int64_t size) { return {{size, 0, 0, 0, 0}, 1}; }
Shape shape_of(const std::vector<int64_t>& sizes) {
  Shape shape{};
  for (int64_t size : sizes) shape.dims[shape.rank++] = size;
  return shape;
}
Shape matrix(int64_t rows, int64_t columns) { return {{rows, columns, 0, 0, 0}, 2}; }

struct Kernel;

constexpr int kAnyShape = -1;  // `sizes` is a tensor's shape

struct Kind {  // an operator: what it takes and gives
  const char* name;
  int inputs, needed, outputs, sizes;
  // Fills the shapes of inputs and outputs, of sizes that make sense; false where they do not suit the operator.
  bool (*plan)(const Kernel&, Shape* in, Shape* out);
  bool (*run)(const Kernel&, const Run&, pf::Parallel);
  bool first_in_place = false;  // the first output may lie where the first input does
};

struct Kernel {
  const Kind* kind;
  std::vector<int64_t> sizes;
  float eps = 0, momentum = 0, decay = 0;
  pf::Conv conv{};
  pf::Norm norm{};
  pf::Pool pool{};
  Shape in[kMostInputs], out[kMostOutputs];
};

const pf::Loops& loops() {
  static const pf::Loops* here = pf::loops_here();
  return *here;
}

constexpr int64_t kMost = 1 << 20, kMostNumbers = int64_t(1) << 31;

bool fits(std::initializer_list<int64_t> extents) {
  int64_t product = PF_LANES;
  for (int64_t extent : extents) {
    if (extent < 1 || extent > kMost) return false;
    product *= extent;
    if (product > kMostNumbers) return false;
  }
  return true;
}

bool plan_conv(const Kernel& k) {
  const pf::Conv& c = k.conv;
  const bool sane = fits({c.batch, c.inputs, c.height, c.width}) && fits({c.outputs, c.inputs, c.rows, c.columns}) &&
                    fits({c.batch, c.outputs, c.out_height, c.out_width}) && c.stride_y > 0 && c.stride_x > 0 &&
                    c.stride_y <= kMost && c.stride_x <= kMost && c.groups > 0 && c.rows * c.columns <= 1024 &&
                    c.pad_y >= 0 && c.pad_x >= 0 && c.pad_y < c.rows && c.pad_x < c.columns;
  if (!sane || c.inputs % c.groups || c.outputs % c.groups) return false;
  if (c.out_height != (c.height + 2 * c.pad_y - c.rows) / c.stride_y + 1 || c.height + 2 * c.pad_y < c.rows) return false;
  if (c.out_width != (c.width + 2 * c.pad_x - c.columns) / c.stride_x + 1 || c.width + 2 * c.pad_x < c.columns)
    return false;
  if (c.groups == 1) return true;
  const bool whole_blocks = c.inputs / c.groups % PF_LANES == 0 && c.outputs / c.groups % PF_LANES == 0;
  return !c.planar && (c.depthwise() || whole_blocks);
}

Shape conv_x(const pf::Conv& c) {
  return c.planar ? planes(c.batch, c.inputs, c.height, c.width) : blocked(c.batch, c.input_blocks(), c.height, c.width);
}
Shape conv_y(const pf::Conv& c) { return blocked(c.batch, c.output_blocks(), c.out_height, c.out_width); }
Shape conv_w(const pf::Conv& c) { return planes(c.outputs, c.inputs / c.groups, c.rows, c.columns); }
Shape activation(const Kernel& k) {
  const pf::Norm& n = k.norm;
  return blocked(n.batch, n.blocks(), k.sizes[2], k.sizes[3]);
}

bool plan_norm(const Kernel& k) {
  const pf::Norm& n = k.norm;
  if (!fits({n.batch, n.channels, k.sizes[2], k.sizes[3]}) || (n.act != 0 && n.act != 1 && n.act != 3 && n.act != 6)) return false;
  return n.groups == 0 || (n.channels % n.groups == 0 && PF_LANES % (n.channels / n.groups) == 0);
}

bool plan_pool(const Kernel& k) {
  const pf::Pool& c = k.pool;
  return fits({c.batch, c.channels, c.height, c.width}) && fits({c.rows, c.columns, c.stride_y, c.stride_x}) &&
         fits({c.batch, c.channels, c.out_height, c.out_width}) && c.pad_y >= 0 && c.pad_x >= 0 && c.pad_y < c.rows &&
         c.pad_x < c.columns && int64_t(c.out_height - 1) * c.stride_y - c.pad_y < c.height &&
         int64_t(c.out_width - 1) * c.stride_x - c.pad_x < c.width;
}

using P = pf::Parallel;

const Kind kKinds[] = {
    {"Conv", 3, 2, 1, 13,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = conv_x(k.conv), in[1] = conv_w(k.conv), in[2] = vector_of(k.conv.outputs), out[0] = conv_y(k.conv);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().conv(k.conv, r.in[0], r.in[1], r.in[2], r.out[0], p); }},
    {"ConvInputGrad", 2, 2, 1, 13,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = conv_y(k.conv), in[1] = conv_w(k.conv), out[0] = conv_x(k.conv);
       return !k.conv.planar;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().conv_input_grad(k.conv, r.in[0], r.in[1], r.out[0], p);
     }},
    {"ConvWeightGrad", 2, 2, 1, 13,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = conv_x(k.conv), in[1] = conv_y(k.conv), out[0] = conv_w(k.conv);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().conv_weight_grad(k.conv, r.in[0], r.in[1], r.out[0], nullptr, p);
     }},
    {"ConvWeightGradSgd", 4, 4, 1, 13,  // x, dy, the weights, the rate
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = conv_x(k.conv), in[1] = conv_y(k.conv), in[2] = out[0] = conv_w(k.conv), in[3] = vector_of(1);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       const pf::Update update = {r.in[2], nullptr, *r.in[3], 0, k.decay, r.out[0], nullptr};
       return loops().conv_weight_grad(k.conv, r.in[0], r.in[1], nullptr, &update, p);
     }},
    {"ConvWeightGradSgdMomentum", 5, 5, 2, 13,  // x, dy, the weights, the rate, their velocity
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = conv_x(k.conv), in[1] = conv_y(k.conv), in[3] = vector_of(1);
       in[2] = in[4] = out[0] = out[1] = conv_w(k.conv);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       const pf::Update update = {r.in[2], r.in[4], *r.in[3], k.momentum, k.decay, r.out[0], r.out[1]};
       return loops().conv_weight_grad(k.conv, r.in[0], r.in[1], nullptr, &update, p);
     }},
    {"ChannelSums", 1, 1, 1, 4,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = activation(k), out[0] = vector_of(k.norm.channels);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().channel_sums(k.norm, r.in[0], r.out[0], p); }},
    {"BatchNorm", 5, 4, 3, 5,  // x, weight, bias, which samples are real, what is added before the activation
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[4] = out[0] = activation(k), in[3] = vector_of(k.norm.batch);
       in[1] = in[2] = out[1] = out[2] = vector_of(k.norm.channels);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().batch_norm(k.norm, r.in[0], r.in[1], r.in[2], r.in[3], r.in[4], r.out[0], r.out[1], r.out[2], p);
     }},
    {"BatchNormGrad", 7, 6, 3, 5,  // dy, x, weight, mean, variance, which samples are real; bias, where it is activated
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[1] = out[0] = activation(k), in[5] = vector_of(k.norm.batch);
       in[2] = in[3] = in[4] = in[6] = out[1] = out[2] = vector_of(k.norm.channels);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().batch_norm_grad(k.norm, r.in[0], r.in[1], nullptr, r.in[2], r.in[6], r.in[3], r.in[4], r.in[5],
                                      r.out[0], r.out[1], r.out[2], nullptr, p);
     },
     true},
    {"BatchNormAddGrad", 7, 7, 4, 5,  // y in the place of the bias; and the gradient of what was added
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[1] = in[6] = out[0] = out[3] = activation(k), in[5] = vector_of(k.norm.batch);
       in[2] = in[3] = in[4] = out[1] = out[2] = vector_of(k.norm.channels);
       return k.norm.act != 3;  // whose result does not say what it was made of
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().batch_norm_grad(k.norm, r.in[0], r.in[1], r.in[6], r.in[2], nullptr, r.in[3], r.in[4], r.in[5],
                                      r.out[0], r.out[1], r.out[2], r.out[3], p);
     },
     true},
    {"GroupNorm", 3, 3, 3, 6,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = out[0] = activation(k), in[1] = in[2] = vector_of(k.norm.channels);
       out[1] = out[2] = matrix(k.norm.batch, k.norm.groups);
       return k.norm.groups > 0;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().group_norm(k.norm, r.in[0], r.in[1], r.in[2], r.out[0], r.out[1], r.out[2], p);
     }},
    {"GroupNormGrad", 5, 5, 3, 6,  // dy, x, weight, mean, 1/√variance
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[1] = out[0] = activation(k), in[3] = in[4] = matrix(k.norm.batch, k.norm.groups);
       in[2] = out[1] = out[2] = vector_of(k.norm.channels);
       return k.norm.groups > 0;
     },
     [](const Kernel& k, const Run& r, P p) {
       return loops().group_norm_grad(k.norm, r.in[0], r.in[1], r.in[2], r.in[3], r.in[4], r.out[0], r.out[1],
                                      r.out[2], p);
     }},
    {"MaxPool", 1, 1, 1, 12,
     [](const Kernel& k, Shape* in, Shape* out) {
       const pf::Pool& c = k.pool;
       in[0] = blocked(c.batch, c.blocks(), c.height, c.width);
       out[0] = blocked(c.batch, c.blocks(), c.out_height, c.out_width);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().max_pool(k.pool, r.in[0], r.out[0], p); }},
    {"MaxPoolGrad", 2, 2, 1, 12,  // dy, x
     [](const Kernel& k, Shape* in, Shape* out) {
       const pf::Pool& c = k.pool;
       in[0] = blocked(c.batch, c.blocks(), c.out_height, c.out_width);
       in[1] = out[0] = blocked(c.batch, c.blocks(), c.height, c.width);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().max_pool_grad(k.pool, r.in[0], r.in[1], r.out[0], p); }},
    {"GlobalMean", 1, 1, 1, 4,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = activation(k), out[0] = matrix(k.norm.batch, k.norm.channels);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().global_mean(k.norm, r.in[0], r.out[0], p); }},
    {"Spread", 1, 1, 1, 4,  // a number per image and channel, to every pixel of its plane
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = matrix(k.norm.batch, k.norm.channels), out[0] = activation(k);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().spread(k.norm, r.in[0], r.out[0], p); }},
    {"ScaleChannels", 2, 2, 1, 4,  // x, and in blocks of channels a number per image and channel
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = out[0] = activation(k), in[1] = blocked(k.norm.batch, k.norm.blocks(), 1, 1);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().scale_channels(k.norm, r.in[0], r.in[1], r.out[0], p); }},
    {"ToBlocks", 1, 1, 1, 4,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = planes(k.norm.batch, k.norm.channels, k.sizes[2], k.sizes[3]), out[0] = activation(k);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().to_blocks(k.norm, r.in[0], r.out[0], p); }},
    {"FromBlocks", 1, 1, 1, 4,
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = activation(k), out[0] = planes(k.norm.batch, k.norm.channels, k.sizes[2], k.sizes[3]);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) { return loops().from_blocks(k.norm, r.in[0], r.out[0], p); }},
    {"Sgd", 3, 3, 1, kAnyShape,  // a parameter, its gradient, the rate
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[1] = out[0] = shape_of(k.sizes), in[2] = vector_of(1);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       const pf::Update update = {r.in[0], nullptr, *r.in[2], 0, k.decay, r.out[0], nullptr};
       return loops().sgd(k.out[0].size(), r.in[1], update, p);
     }},
    {"SgdMomentum", 4, 4, 2, kAnyShape,  // a parameter, its gradient, the rate, its velocity
     [](const Kernel& k, Shape* in, Shape* out) {
       in[0] = in[1] = in[3] = out[0] = out[1] = shape_of(k.sizes), in[2] = vector_of(1);
       return true;
     },
     [](const Kernel& k, const Run& r, P p) {
       const pf::Update update = {r.in[0], r.in[3], *r.in[2], k.momentum, k.decay, r.out[0], r.out[1]};
       return loops().sgd(k.out[0].size(), r.in[1], update, p);
     }},
};

bool read_sizes(Kernel& k) {
  const std::vector<int64_t>& s = k.sizes;
  if (k.kind->sizes == kAnyShape) {
    int64_t numbers = 1;
    for (int64_t size : s) {
      if (size < 1 || size > kMostNumbers) return false;
      numbers *= size;
      if (numbers > kMostNumbers) return false;
    }
    return s.size() >= 1 && s.size() <= 5;
  }
  if (s.size() != size_t(k.kind->sizes)) return false;
  for (int64_t size : s)
    if (size < 0 || size > kMost) return false;
  auto at = [&](int i) { return int(s[i]); };
  if (s.size() == 13)
    k.conv = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11),
              (at(2) + 2 * at(9) - at(5)) / (at(7) > 0 ? at(7) : 1) + 1,
              (at(3) + 2 * at(10) - at(6)) / (at(8) > 0 ? at(8) : 1) + 1, at(12) != 0};
  else if (s.size() == 12)
    k.pool = {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11)};
  else
    k.norm = {at(0), at(1), 0, s.size() > 4 ? at(4) : 0, s.size() > 5 ? at(5) : 0, k.eps};
  if (s.size() == 13) return plan_conv(k);
  if (s.size() == 12) return plan_pool(k);
  if (!fits({s[0], s[1], s[2], s[3]})) return false;
  k.norm.positions = at(2) * at(3);
  return plan_norm(k);
}

OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** made);

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const Kernel& k = *static_cast<Kernel*>(kernel);
  Run run;
  run.context = context;
  size_t given = 0;
  if (OrtStatus* s = ort::call<const OrtKernelContext*, size_t*>(api, ort::kGetInputCount, context, &given)) return s;
  for (size_t i = 0; i < given && i < size_t(k.kind->inputs); ++i) {
    const OrtValue* value = nullptr;
    if (OrtStatus* s = ort::call<const OrtKernelContext*, size_t, const OrtValue**>(api, ort::kGetInput, context, i, &value))
      return s;
    if (value == nullptr) continue;
    OrtTensorTypeAndShapeInfo* shape = nullptr;
    if (OrtStatus* s = ort::call<const OrtValue*, OrtTensorTypeAndShapeInfo**>(api, ort::kGetTensorTypeAndShape, value, &shape))
      return s;
    OrtStatus* status = ort::call<const OrtTensorTypeAndShapeInfo*, size_t*>(
        api, ort::kGetTensorShapeElementCount, shape, &run.in_size[i]);
    using Release = void (*)(OrtTensorTypeAndShapeInfo*);
    reinterpret_cast<Release const*>(api)[ort::kReleaseTensorTypeAndShapeInfo](shape);
    if (status) return status;
    if (run.in_size[i] != k.in[i].size()) {
      char text[160];
      snprintf(text, sizeof text, "protofleet.kernels %s: input %zu has %zu numbers where %zu belong", k.kind->name, i,
               run.in_size[i], k.in[i].size());
      return failure(text);
    }
    void* data = nullptr;
    if (OrtStatus* s = ort::call<OrtValue*, void**>(api, ort::kGetTensorMutableData, const_cast<OrtValue*>(value), &data))
      return s;
    run.in[i] = static_cast<const float*>(data);
  }
  for (int i = 0; i < k.kind->needed; ++i)
    if (!run.in[i]) return failure("protofleet.kernels: an input is missing");
  for (int i = 0; i < k.kind->outputs; ++i) {
    OrtValue* value = nullptr;
    if (OrtStatus* s = ort::call<OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>(
            api, ort::kGetOutput, context, size_t(i), k.out[i].dims, k.out[i].rank, &value))
      return s;
    void* data = nullptr;
    if (OrtStatus* s = ort::call<OrtValue*, void**>(api, ort::kGetTensorMutableData, value, &data)) return s;
    run.out[i] = static_cast<float*>(data);
  }
  if (!k.kind->run(k, run, {run_parallel, context})) return failure("protofleet.kernels: out of memory");
  return nullptr;
}

struct Operator : OrtCustomOp {
  const Kind* kind;
};

const Kind& kind_of(const OrtCustomOp* op) { return *static_cast<const Operator*>(op)->kind; }

OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** made) {
  std::unique_ptr<Kernel> k(new (std::nothrow) Kernel);
  if (!k) return failure("protofleet.kernels: out of memory");
  k->kind = &kind_of(op);
  std::vector<int64_t> sizes(32);
  size_t room = sizes.size();
  if (OrtStatus* s = ort::call<const OrtKernelInfo*, const char*, int64_t*, size_t*>(
          api, ort::kGetAttributeInts, info, "sizes", sizes.data(), &room))
    return s;
  sizes.resize(room);
  k->sizes = sizes;
  if (std::strstr(k->kind->name, "Norm"))
    if (OrtStatus* s = ort::call<const OrtKernelInfo*, const char*, float*>(api, ort::kGetAttributeFloat, info, "eps", &k->eps))
      return s;
  if (std::strstr(k->kind->name, "Sgd")) {
    if (OrtStatus* s = ort::call<const OrtKernelInfo*, const char*, float*>(api, ort::kGetAttributeFloat, info, "momentum", &k->momentum))
      return s;
    if (OrtStatus* s = ort::call<const OrtKernelInfo*, const char*, float*>(api, ort::kGetAttributeFloat, info, "decay", &k->decay))
      return s;
  }
  if ((k->kind->sizes != kAnyShape && room != size_t(k->kind->sizes)) || !read_sizes(*k) || !k->kind->plan(*k, k->in, k->out)) {
    char text[96];
    snprintf(text, sizeof text, "protofleet.kernels %s: sizes that make no sense", k->kind->name);
    return failure(text);
  }
  *made = k.release();
  return nullptr;
}

Operator* operator_of(const Kind& kind) {
  auto* op = new (std::nothrow) Operator{};
  if (!op) return nullptr;
  op->kind = &kind;
  op->version = ort::kOpVersion;
  op->GetName = [](const OrtCustomOp* o) { return kind_of(o).name; };
  op->GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op->GetInputType = [](const OrtCustomOp*, size_t) -> int { return kFloat; };
  op->GetOutputType = op->GetInputType;
  op->GetInputTypeCount = [](const OrtCustomOp* o) { return size_t(kind_of(o).inputs); };
  op->GetOutputTypeCount = [](const OrtCustomOp* o) { return size_t(kind_of(o).outputs); };
  op->GetInputCharacteristic = [](const OrtCustomOp* o, size_t i) -> int {
    return int(i) < kind_of(o).needed ? kRequired : kOptional;
  };
  op->GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op->GetInputMemoryType = [](const OrtCustomOp*, size_t) -> int { return 0; };
  op->GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op->GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
  if (kind.first_in_place) {
    op->GetMayInplace = [](int** inputs, int** outputs) {
      static int first = 0;
      *inputs = *outputs = &first;
      return size_t(1);
    };
    op->ReleaseMayInplace = [](int*, int*) {};
  }
  op->CreateKernelV2 = create;
  op->KernelComputeV2 = compute;
  op->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* here = base->GetApi(ort::kApiVersion);
  if (here == nullptr) {  // an older ONNX Runtime
    using Create = OrtStatus* (*)(int, const char*);
    return reinterpret_cast<Create const*>(base->GetApi(1))[ort::kCreateStatus](kOrtFail, "protofleet.kernels needs ONNX Runtime 1.18 or newer");
  }
  api = here;
  static std::vector<Operator*>* made = [] {
    auto* all = new std::vector<Operator*>;
    for (const Kind& kind : kKinds) all->push_back(operator_of(kind));
    return all;
  }();
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* s = ort::call<const char*, OrtCustomOpDomain**>(api, ort::kCreateCustomOpDomain, "protofleet.kernels", &domain))
    return s;
  for (Operator* op : *made)
    if (OrtStatus* s = ort::call<OrtCustomOpDomain*, const OrtCustomOp*>(api, ort::kCustomOpDomainAdd, domain, op)) return s;
  return ort::call<OrtSessionOptions*, OrtCustomOpDomain*>(api, ort::kAddCustomOpDomain, options, domain);
}

// The set of loops that this processor takes: baseline, avx2, avx512 or neon.
__attribute__((visibility("default"))) const char* protofleet_kernels_loops() { return loops().name; }
}
