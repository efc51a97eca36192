// Atomic 8-byte words in memory shared with other processes.
#pragma once

#include <cstdint>

namespace penstock {

inline std::uint64_t load_acquire(const std::uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline void store_release(std::uint64_t* word, std::uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline std::uint64_t fetch_add(std::uint64_t* word, std::uint64_t addend) {
  return __atomic_fetch_add(word, addend, __ATOMIC_ACQ_REL);
}

inline bool compare_exchange(std::uint64_t* word, std::uint64_t expected, std::uint64_t desired) {
  return __atomic_compare_exchange_n(word, &expected, desired, /*weak=*/false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
}

}  // namespace penstock
