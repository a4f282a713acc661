// The loops alone against naive ones in double, on drawn shapes, without ONNX Runtime: for sanitizers, and for
// processors that are emulated. `loops_check [rounds]` tries the set that this processor takes; it ends with 1 where a
// result is wrong. Every tensor is exactly as large as it must be, so that a sanitizer sees what is read beyond it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../src/loops.h"

namespace {

using Tensor = std::vector<float>;
std::mt19937 generator(1);
int failures = 0;

int draw(int from, int to) { return std::uniform_int_distribution<int>(from, to)(generator); }

Tensor normal(size_t count) {
  std::normal_distribution<float> values;
  Tensor out(count);
  for (float& v : out) v = values(generator);
  return out;
}

void serial(void*, void (*body)(void*, size_t), size_t count, void* context) {
  for (size_t i = 0; i < count; ++i) body(context, i);
}
const pf::Parallel kSerial = {serial, nullptr};

Tensor blocks(const Tensor& x, int n, int c, int positions) {
  const int count = (c + PF_LANES - 1) / PF_LANES;
  Tensor out(size_t(n) * count * positions * PF_LANES);
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < c; ++k)
      for (int p = 0; p < positions; ++p)
        out[((size_t(i) * count + k / PF_LANES) * positions + p) * PF_LANES + k % PF_LANES] =
            x[(size_t(i) * c + k) * positions + p];
  return out;
}

Tensor planes(const Tensor& x, int n, int c, int positions) {
  const int count = (c + PF_LANES - 1) / PF_LANES;
  Tensor out(size_t(n) * c * positions);
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < c; ++k)
      for (int p = 0; p < positions; ++p)
        out[(size_t(i) * c + k) * positions + p] =
            x[((size_t(i) * count + k / PF_LANES) * positions + p) * PF_LANES + k % PF_LANES];
  return out;
}

void compare(const char* what, const pf::Conv& c, const Tensor& ours, const std::vector<double>& exact) {
  double worst = 0, largest = 1e-6;
  for (size_t i = 0; i < exact.size(); ++i) {
    worst = std::fmax(worst, std::fabs(ours[i] - exact[i]));
    largest = std::fmax(largest, std::fabs(exact[i]));
  }
  if (worst <= 4e-5 * largest) return;  // of Winograd's; ten times what direct products are off by
  ++failures;
  std::printf("%s off by %.1e: N %d, C %d, %d x %d, O %d, kernel %d x %d, stride %d %d, padding %d %d, groups %d, planar %d\n",
              what, worst / largest, c.batch, c.inputs, c.height, c.width, c.outputs, c.rows, c.columns, c.stride_y,
              c.stride_x, c.pad_y, c.pad_x, c.groups, c.planar);
}

void one_convolution(const pf::Loops& loops) {
  pf::Conv c{};
  const int kind = draw(0, 3);
  c.batch = draw(1, 6), c.height = draw(1, 12), c.width = draw(1, 12);
  c.rows = draw(1, 4), c.columns = draw(1, 4);
  if (draw(0, 1)) c.rows = c.columns = draw(0, 1) ? 3 : 1;
  c.stride_y = draw(1, 3), c.stride_x = draw(1, 3), c.pad_y = draw(0, c.rows - 1), c.pad_x = draw(0, c.columns - 1);
  c.height = std::max(c.height, c.rows), c.width = std::max(c.width, c.columns);
  c.inputs = draw(1, 50), c.outputs = draw(1, 50), c.groups = 1, c.planar = kind == 0;
  if (kind == 1) c.inputs = c.outputs = c.groups = draw(2, 50);
  if (kind == 2) c.groups = 2, c.inputs = 32 * draw(1, 2), c.outputs = 32 * draw(1, 2);
  if (draw(0, 3) == 0)  // what has fewer products
    c.rows = c.columns = 3, c.stride_y = c.stride_x = c.pad_y = c.pad_x = 1, c.inputs = draw(24, 40),
    c.outputs = draw(24, 40), c.groups = 1, c.planar = 0, c.height = std::max(c.height, 4), c.width = std::max(c.width, 4);
  c.out_height = (c.height + 2 * c.pad_y - c.rows) / c.stride_y + 1;
  c.out_width = (c.width + 2 * c.pad_x - c.columns) / c.stride_x + 1;
  const int in = c.height * c.width, out = c.out_height * c.out_width, taps = c.rows * c.columns;
  const int own = c.inputs / c.groups, each = c.outputs / c.groups;
  const Tensor x = normal(size_t(c.batch) * c.inputs * in), w = normal(size_t(c.outputs) * own * taps);
  const Tensor dy = normal(size_t(c.batch) * c.outputs * out);
  std::vector<double> y(dy.size()), dx(x.size()), dw(w.size());
  for (int n = 0; n < c.batch; ++n)
    for (int o = 0; o < c.outputs; ++o)
      for (int p = 0; p < out; ++p)
        for (int k = 0; k < own; ++k)
          for (int t = 0; t < taps; ++t) {
            const int h = p / c.out_width * c.stride_y + t / c.columns - c.pad_y;
            const int v = p % c.out_width * c.stride_x + t % c.columns - c.pad_x;
            if (h < 0 || h >= c.height || v < 0 || v >= c.width) continue;
            const size_t xi = (size_t(n) * c.inputs + o / each * own + k) * in + h * c.width + v;
            const size_t wi = (size_t(o) * own + k) * taps + t, yi = (size_t(n) * c.outputs + o) * out + p;
            y[yi] += double(x[xi]) * w[wi], dx[xi] += double(dy[yi]) * w[wi], dw[wi] += double(dy[yi]) * x[xi];
          }
  const Tensor image = c.planar ? x : blocks(x, c.batch, c.inputs, in), grad = blocks(dy, c.batch, c.outputs, out);
  Tensor ours(size_t(c.batch) * c.output_blocks() * out * PF_LANES, NAN), gradient(w.size(), NAN);
  loops.conv(c, image.data(), w.data(), nullptr, ours.data(), kSerial);
  compare("convolution", c, planes(ours, c.batch, c.outputs, out), y);
  loops.conv_weight_grad(c, image.data(), grad.data(), gradient.data(), nullptr, kSerial);
  compare("weight gradient", c, gradient, dw);
  const Tensor velocity = normal(w.size());
  Tensor next(w.size(), NAN), next_velocity(w.size(), NAN);
  const pf::Update update = {w.data(), velocity.data(), 0.1f, 0.9f, 0.01f, next.data(), next_velocity.data()};
  loops.conv_weight_grad(c, image.data(), grad.data(), nullptr, &update, kSerial);
  std::vector<double> moved(w.size()), faster(w.size());
  for (size_t i = 0; i < w.size(); ++i)
    faster[i] = 0.9 * velocity[i] + (gradient[i] + 0.01 * w[i]), moved[i] = w[i] - 0.1 * faster[i];
  compare("velocity", c, next_velocity, faster), compare("step", c, next, moved);
  if (c.planar) return;
  Tensor back(image.size(), NAN);
  loops.conv_input_grad(c, grad.data(), w.data(), back.data(), kSerial);
  compare("input gradient", c, planes(back, c.batch, c.inputs, in), dx);
}

void one_normalisation(const pf::Loops& loops) {  // for sanitizers: numbers are compared in test_operators.py
  pf::Norm n{draw(1, 4), draw(1, 50), draw(1, 30), draw(0, 3) * 2, 0, 1e-5f};
  if (n.act == 2) n.act = 1;
  if (n.act == 4) n.act = 3;
  const size_t size = size_t(n.batch) * n.blocks() * n.positions * PF_LANES;
  const Tensor x = normal(size), dy = normal(size), w = normal(n.channels), b = normal(n.channels);
  const Tensor real(n.batch, 1.0f);
  Tensor y(size), mean(n.channels), var(n.channels), dx(size), dw(n.channels), db(n.channels), masked(size);
  loops.batch_norm(n, x.data(), w.data(), b.data(), real.data(), dy.data(), y.data(), mean.data(), var.data(), kSerial);
  loops.batch_norm_grad(n, dy.data(), x.data(), y.data(), w.data(), nullptr, mean.data(), var.data(), real.data(),
                        dx.data(), dw.data(), db.data(), masked.data(), kSerial);
  loops.channel_sums(n, dy.data(), db.data(), kSerial);
  Tensor flat(size_t(n.batch) * n.channels * n.positions);
  loops.from_blocks(n, x.data(), flat.data(), kSerial);
  loops.to_blocks(n, flat.data(), dx.data(), kSerial);
  Tensor averages(size_t(n.batch) * n.channels);
  loops.global_mean(n, x.data(), averages.data(), kSerial);
  loops.spread(n, averages.data(), dx.data(), kSerial);
  const Tensor gate = normal(size_t(n.batch) * n.blocks() * PF_LANES);
  loops.scale_channels(n, x.data(), gate.data(), y.data(), kSerial);
  n.act = 0, n.groups = n.channels;
  Tensor centre(size_t(n.batch) * n.groups), root(centre.size());
  loops.group_norm(n, x.data(), w.data(), b.data(), y.data(), centre.data(), root.data(), kSerial);
  loops.group_norm_grad(n, dy.data(), x.data(), w.data(), centre.data(), root.data(), dx.data(), dw.data(), db.data(),
                        kSerial);
  pf::Pool p{n.batch, n.channels, draw(3, 9), draw(3, 9), draw(1, 3), draw(1, 3), draw(1, 3), draw(1, 3), 0, 0, 0, 0};
  p.out_height = (p.height - p.rows) / p.stride_y + 1, p.out_width = (p.width - p.columns) / p.stride_x + 1;
  const size_t plane = size_t(n.batch) * n.blocks() * PF_LANES;
  const Tensor image = normal(plane * p.height * p.width);
  Tensor pooled(plane * p.out_height * p.out_width), spread(image.size());
  loops.max_pool(p, image.data(), pooled.data(), kSerial);
  loops.max_pool_grad(p, pooled.data(), image.data(), spread.data(), kSerial);
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 200;
  const pf::Loops& loops = *pf::loops_here();
  for (int i = 0; i < rounds; ++i) one_convolution(loops), one_normalisation(loops);
  std::printf("%s: %d rounds, %d wrong\n", loops.name, rounds, failures);
  return failures > 0;
}
