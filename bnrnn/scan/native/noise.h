// The random factors of zoneout and recurrent dropout. bnrnn/scan/noise.py defines them.

#pragma once

#include "products.h"

namespace {

typedef uint32_t WideWord __attribute__((vector_size(4 * LANES)));

const uint32_t SPREAD = 0x9E3779B1u;

// Each bit of the result depends on all bits of x and of `more`. Words are uint32_t or WideWord.
template <typename Word, typename More>
inline __attribute__((always_inline)) Word mixed(Word x, More more) {
  x ^= x >> 16;
  x = x * 0x7FEB352Du + more;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The factors of a time step. Without a key they are the expected ones.
struct Noise {
  bool random;
  uint32_t first = 0, second = 0;            // hash of the key and of the step
  uint32_t below_c = 0, below_h = 0, at_least = 0;  // limits of 16 bits of the hash
  float kept_c, kept_h, passed;

  Noise(const int64_t* key, float zoneout_c, float zoneout_h, float dropout, int64_t t)
      : random(key != nullptr), kept_c(zoneout_c), kept_h(zoneout_h), passed(1.0f - dropout) {
    if (!random) return;
    const uint32_t counter = (uint32_t)t * SPREAD;
    first = mixed((uint32_t)*key + counter, 0u);
    second = mixed((uint32_t)((uint64_t)*key >> 32) ^ counter, 0u);
    below_c = limit(zoneout_c), below_h = limit(zoneout_h), at_least = limit(dropout);
  }
  static uint32_t limit(float p) { return (uint32_t)__builtin_rint((double)p * 65536.0); }

  // The hash of the key, the step and sequence b.
  struct Row {
    uint32_t first, second;
  };
  Row row(int64_t b) const {
    const uint32_t counter = (uint32_t)b * SPREAD;
    return {mixed(first + counter, 0u), mixed(second ^ counter, 0u)};
  }
  // The parts of the previous c and h that LANES units from j on keep, and the factor of their candidates.
  inline __attribute__((always_inline)) void factors(Row row, int j, Wide& c, Wide& h, Wide& g) const {
    if (!random) {
      c = Wide{} + kept_c, h = Wide{} + kept_h, g = Wide{} + passed;
      return;
    }
    WideWord unit;
    for (int k = 0; k < LANES; ++k) unit[k] = k * SPREAD;
    const WideWord hash = mixed(unit + ((uint32_t)j * SPREAD + row.first), row.second);
    const Wide one = Wide{} + 1.0f;
    c = (hash & 0xFFFFu) < below_c ? one : Wide{};
    h = (hash >> 16) < below_h ? one : Wide{};
    g = at_least == 0 ? one : ((hash * 0x9E485565u) >> 16) >= at_least ? one : Wide{};
  }
};

}  // namespace
