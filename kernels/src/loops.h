// What the loops compute, and in which order they hold it. One set of them is compiled for each kind of processor.
//
// An activation (N, C, H, W) is held as blocks of 16 channels, (N, C/16, H, W, 16), the last block filled up with zeros:
// one vector is one pixel's block. Weights come and go in torch's order, (O, I / groups, kh, kw).
#pragma once
#include <stddef.h>
#include <stdint.h>

#define PF_LANES 16

namespace pf {

struct Conv {
  int batch, inputs, height, width;         // x: N, C, H, W
  int outputs, rows, columns;               // w: O, kh, kw
  int stride_y, stride_x, pad_y, pad_x, groups;
  int out_height, out_width;                // y: OH, OW
  int planar;                               // x is (N, C, H, W), not in blocks: the first layer
  int input_blocks() const { return (inputs + PF_LANES - 1) / PF_LANES; }
  int output_blocks() const { return (outputs + PF_LANES - 1) / PF_LANES; }
  bool depthwise() const { return groups > 1 && groups == inputs && groups == outputs; }
};

struct Norm {
  int batch, channels, positions;           // x: N, C, H·W
  int act;                                  // 0 none, 1 max(0, ·), 6 min(6, max(0, ·)), 3 x · min(6, max(0, x + 3)) / 6
  int groups;                               // of a group normalisation; 0 for a batch normalisation
  float eps;
  int blocks() const { return (channels + PF_LANES - 1) / PF_LANES; }
};

struct Pool {
  int batch, channels, height, width, rows, columns, stride_y, stride_x, pad_y, pad_x, out_height, out_width;
  int blocks() const { return (channels + PF_LANES - 1) / PF_LANES; }
};

// Runs body(context, i) for i in [0, count), on any thread and in any order.
struct Parallel {
  void (*run)(void* runner, void (*body)(void*, size_t), size_t count, void* context);
  void* runner;
};

// A parameter's step of SGD: v = momentum · m + g + decay · p, p_next = p − rate · v, m_next = v. Without momentum m and
// m_next are null.
struct Update {
  const float *p, *m;
  float rate, momentum, decay;
  float *p_next, *m_next;
};

// Each returns false where memory is short.
struct Loops {
  const char* name;
  bool (*conv)(const Conv&, const float* x, const float* w, const float* bias, float* y, Parallel);
  bool (*conv_input_grad)(const Conv&, const float* dy, const float* w, float* dx, Parallel);
  // The weight gradient, or, where an update is given, what it moves the weights to; then dw is null.
  bool (*conv_weight_grad)(const Conv&, const float* x, const float* dy, float* dw, const Update*, Parallel);
  bool (*channel_sums)(const Norm&, const float* dy, float* sums, Parallel);
  bool (*batch_norm)(const Norm&, const float* x, const float* w, const float* b, const float* real,
                     const float* residual, float* y, float* mean, float* var, Parallel);
  // Of the activation's result: y, or bias to make it again of x.
  bool (*batch_norm_grad)(const Norm&, const float* dy, const float* x, const float* y, const float* w,
                          const float* bias, const float* mean, const float* var, const float* real, float* dx,
                          float* dw, float* db, float* masked, Parallel);
  bool (*group_norm)(const Norm&, const float* x, const float* w, const float* b, float* y, float* mean, float* rstd,
                     Parallel);
  bool (*group_norm_grad)(const Norm&, const float* dy, const float* x, const float* w, const float* mean,
                          const float* rstd, float* dx, float* dw, float* db, Parallel);
  bool (*max_pool)(const Pool&, const float* x, float* y, Parallel);
  bool (*max_pool_grad)(const Pool&, const float* dy, const float* x, float* dx, Parallel);
  bool (*global_mean)(const Norm&, const float* x, float* y, Parallel);
  bool (*spread)(const Norm&, const float* x, float* y, Parallel);
  bool (*scale_channels)(const Norm&, const float* x, const float* scale, float* y, Parallel);
  bool (*to_blocks)(const Norm&, const float* x, float* y, Parallel);
  bool (*from_blocks)(const Norm&, const float* x, float* y, Parallel);
  bool (*sgd)(size_t count, const float* g, const Update&, Parallel);
};

const Loops* loops_baseline();
#if defined(__x86_64__)
const Loops* loops_avx2();
const Loops* loops_avx512();
#endif
const Loops* loops_here();  // the fastest set that this processor can run

}  // namespace pf
