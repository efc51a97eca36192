// How gradients, master and weights lie in memory: what the loop reads and writes them with.
//
// The types that training uses most have classes of their own; all others share the Any classes,
// which look the type up for every vector.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace penstock {
namespace {

// Integer arithmetic, because the address may lie beyond the array.
template <bool kWrite>
inline void prefetch_at(const void* base, std::size_t offset) {
  const auto address = reinterpret_cast<std::uintptr_t>(base) + offset;
  __builtin_prefetch(reinterpret_cast<const void*>(address), kWrite, 3);
}

inline const std::uint16_t* words(const void* base) {
  return static_cast<const std::uint16_t*>(base);
}

struct Float32Grads {
  explicit Float32Grads(GradType) {}
  std::size_t element_bytes() const { return 4; }
  template <class V>
  typename V::Floats load(const void* base, std::size_t i) const {
    return V::load(static_cast<const float*>(base) + i);
  }
};

struct Bfloat16Grads {
  explicit Bfloat16Grads(GradType) {}
  std::size_t element_bytes() const { return 2; }
  template <class V>
  typename V::Floats load(const void* base, std::size_t i) const {
    return V::load_bf16(words(base) + i);
  }
};

struct AnyGrads {
  explicit AnyGrads(GradType of_type) : type(of_type) {}
  std::size_t element_bytes() const { return type == GradType::kFloat32 ? 4 : 2; }
  template <class V>
  typename V::Floats load(const void* base, std::size_t i) const {
    if (type == GradType::kFloat32) return V::load(static_cast<const float*>(base) + i);
    return type == GradType::kBfloat16 ? V::load_bf16(words(base) + i)
                                       : V::load_fp16(words(base) + i);
  }
  const GradType type;
};

struct Float32Weights {
  explicit Float32Weights(WeightsType) {}
  template <class V>
  void store(void* base, std::size_t i, const typename V::Floats& x) const {
    V::store(static_cast<float*>(base) + i, x);
  }
};

struct Bfloat16Weights {
  explicit Bfloat16Weights(WeightsType) {}
  template <class V>
  void store(void* base, std::size_t i, const typename V::Floats& x) const {
    V::stream_bf16(static_cast<std::uint16_t*>(base) + i, x);
  }
};

struct AnyWeights {
  explicit AnyWeights(WeightsType of_type) : type(of_type) {}
  template <class V>
  void store(void* base, std::size_t i, const typename V::Floats& x) const {
    switch (type) {
      case WeightsType::kFloat32:
        return V::store(static_cast<float*>(base) + i, x);
      case WeightsType::kBfloat16:
        return V::stream_bf16(static_cast<std::uint16_t*>(base) + i, x);
      case WeightsType::kFloat16:
        return V::stream_fp16(static_cast<std::uint16_t*>(base) + i, x);
    }
  }
  const WeightsType type;
};

// Master in float32; weights are a rounded copy of it.
template <class Weights>
class WideStore {
 public:
  explicit WideStore(const SweepArguments& args)
      : master_(args.master), weights_(args.weights), type_(args.weights_type) {}

  template <class V>
  typename V::Floats load_master(std::size_t i) const {
    return V::load(master_ + i);
  }
  template <class V>
  void store_master(std::size_t i, const typename V::Floats& x) const {
    V::store(master_ + i, x);
  }
  template <class V>
  void store_weights(std::size_t i, const typename V::Floats& x) const {
    type_.template store<V>(weights_, i, x);
  }
  template <bool kWrite>
  void prefetch_master(std::size_t i) const {
    prefetch_at<kWrite>(master_, i * sizeof(float));
  }

 private:
  float* const master_;
  void* const weights_;
  const Weights type_;
};

// Master in two halves. The upper ones, rounded half up in the bits, are the bf16 weights; of a
// step's they lie in another slot than those before it. Storing master writes the lower halves.
class SplitStore {
 public:
  explicit SplitStore(const SweepArguments& args)
      : high_(args.high), low_(args.low), weights_(static_cast<std::uint16_t*>(args.weights)) {}

  template <class V>
  typename V::Floats load_master(std::size_t i) const {
    return V::load_split(high_ + i, low_ + i);
  }
  template <class V>
  void store_master(std::size_t i, const typename V::Floats& x) const {
    V::store_low(low_ + i, x);
  }
  template <class V>
  void store_weights(std::size_t i, const typename V::Floats& x) const {
    V::stream_high(weights_ + i, x);
  }
  template <bool kWrite>
  void prefetch_master(std::size_t i) const {
    prefetch_at<false>(high_, i * sizeof(std::uint16_t));
    prefetch_at<kWrite>(low_, i * sizeof(std::uint16_t));
  }

 private:
  const std::uint16_t* const high_;
  std::uint16_t* const low_;
  std::uint16_t* const weights_;
};

}  // namespace
}  // namespace penstock
