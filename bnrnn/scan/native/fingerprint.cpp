// Tells whether an array has changed.

#include <cstdint>
#include <cstring>

extern "C" {

// A hash of the bits of n values. A change of a single value always changes it.
uint64_t bnrnn_fingerprint(const float* values, int64_t n) {
  const int PARTS = 64;
  uint32_t part[PARTS], word;
  for (int i = 0; i < PARTS; ++i) part[i] = i;
  int64_t at = 0;
  for (; at + PARTS <= n; at += PARTS)
    for (int i = 0; i < PARTS; ++i) {
      std::memcpy(&word, values + at + i, sizeof word);
      const uint32_t mixed = part[i] + word * 0x85EBCA77u;
      part[i] = (mixed << 13 | mixed >> 19) * 0x9E3779B1u;
    }
  uint64_t hash = n;
  const auto mix = [&](uint32_t with) { hash = (hash ^ with) * 0x9E3779B97F4A7C15u, hash ^= hash >> 32; };
  for (; at < n; ++at) std::memcpy(&word, values + at, sizeof word), mix(word);
  for (int i = 0; i < PARTS; ++i) mix(part[i]);
  return hash;
}

}  // extern "C"
