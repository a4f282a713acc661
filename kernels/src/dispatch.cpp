// Which set of loops this processor can run, asked of the processor itself: what it has (CPUID), and which registers the
// system keeps for a process (XGETBV). Not __builtin_cpu_supports: what stands behind it is missing in some compilers'
// libraries, where it says no to everything.
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "loops.h"

namespace pf {

#if defined(__x86_64__)
namespace {

struct Processor {
  bool avx2 = false, avx512 = false;

  Processor() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const unsigned fma = 1u << 12, movbe = 1u << 22, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    const unsigned first = fma | movbe | osxsave | avx | f16c;
    if ((c & first) != first) return;
    unsigned kept = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    const unsigned ymm = 0x06, zmm = 0xe6;  // SSE and AVX; with them the masks and both halves of the 512 bits
    if ((kept & ymm) != ymm || !__get_cpuid(0x80000001, &a, &b, &c, &d)) return;
    const unsigned lzcnt = 1u << 5;
    if (!(c & lzcnt) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned bmi1 = 1u << 3, avx2_bit = 1u << 5, bmi2 = 1u << 8;
    avx2 = (b & (bmi1 | avx2_bit | bmi2)) == (bmi1 | avx2_bit | bmi2);  // x86-64-v3, as loops_avx2 is compiled
    const unsigned f = 1u << 16, dq = 1u << 17, cd = 1u << 28, bw = 1u << 30, vl = 1u << 31;
    avx512 = avx2 && (kept & zmm) == zmm && (b & (f | dq | cd | bw | vl)) == (f | dq | cd | bw | vl);  // x86-64-v4
  }
};

}  // namespace
#endif

const Loops* loops_here() {
  const Loops* best = loops_baseline();
#if defined(__x86_64__)
  static const Processor processor;
  const char* most = std::getenv("PROTOFLEET_KERNELS");  // baseline or avx2: for tests of what other processors run
  const bool any = most == nullptr || *most == 0;
  if (!any && std::strcmp(most, "baseline") == 0) return best;
  if (processor.avx2) best = loops_avx2();
  if (!any && std::strcmp(most, "avx2") == 0) return best;
  if (processor.avx512) best = loops_avx512();
#endif
  return best;
}

}  // namespace pf
