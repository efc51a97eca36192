#include "arguments.h"

#include <cmath>
#include <stdexcept>

#include "steps.h"

namespace penstock {
namespace nb = nanobind;
namespace {

constexpr std::uintptr_t kArrayAlignment = 64;

[[noreturn]] void reject(const std::string& message) { throw std::invalid_argument(message); }

std::string text(std::int64_t value) { return std::to_string(value); }

bool is_float32(const nb::dlpack::dtype& type) { return type == nb::dtype<float>(); }

bool is_float16(const nb::dlpack::dtype& type) {
  return type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16 &&
         type.lanes == 1;
}

// numpy has no bf16: its bit patterns travel as uint16, as do weights in fp16.
bool is_uint16(const nb::dlpack::dtype& type) { return type == nb::dtype<std::uint16_t>(); }

GradType grad_type(const std::string& name, const nb::dlpack::dtype& type) {
  if (is_float32(type)) return GradType::kFloat32;
  if (is_float16(type)) return GradType::kFloat16;
  if (!is_uint16(type)) reject(name + " must be float32, float16, or uint16 holding bf16");
  return GradType::kBfloat16;
}

void check_vectors(const std::string& name, std::int64_t start, std::int64_t end,
                   std::uint64_t num_elements) {
  const bool inside = start >= 0 && start < end && static_cast<std::uint64_t>(end) <= num_elements;
  if (!inside || start % kVector != 0 || end % kVector != 0) {
    reject(name + " holds (" + text(start) + ", " + text(end) +
           "): bounds must be rising multiples of 16 within 0.." + std::to_string(num_elements));
  }
}

}  // namespace

BufferView::BufferView(nb::handle object, bool writable) {
  if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
    throw nb::python_error();
  }
}

BufferView::~BufferView() { PyBuffer_Release(&view_); }

std::uint64_t* BufferView::word(std::int64_t byte_offset) const {
  if (byte_offset < 0 || byte_offset > view_.len - 8) {
    reject("byte_offset " + text(byte_offset) + " plus 8 does not fit a buffer of " +
           text(view_.len) + " bytes");
  }
  auto* address = static_cast<unsigned char*>(view_.buf) + byte_offset;
  if (reinterpret_cast<std::uintptr_t>(address) % 8 != 0) {
    reject("byte_offset " + text(byte_offset) + " is not 8-byte aligned in memory");
  }
  return reinterpret_cast<std::uint64_t*>(address);
}

const nb::ndarray<nb::ro>& ArrayArguments::add(const std::string& name, nb::handle object,
                                               Access access) {
  nb::ndarray<nb::ro> array;
  nb::ndarray<> writable;
  if (!nb::try_cast(object, array, /*convert=*/false)) {
    throw nb::type_error((name + " must be a numpy array").c_str());
  }
  if (access == Access::kWrite && !nb::try_cast(object, writable, /*convert=*/false)) {
    reject(name + " must be writable");
  }
  if (array.ndim() != 1 || (array.shape(0) > 1 && array.stride(0) != 1)) {
    reject(name + " must be one-dimensional and contiguous");
  }
  const std::uint64_t length = array.shape(0);
  if (arrays_.empty()) {
    if (length == 0 || length % kVector != 0) {
      reject(name + " has " + std::to_string(length) +
             " elements: the number must be a positive multiple of 16");
    }
    first_name_ = name;
    num_elements_ = length;
  } else if (length != num_elements_) {
    reject(name + " has " + std::to_string(length) + " elements, " + first_name_ + " has " +
           std::to_string(num_elements_));
  }
  if (reinterpret_cast<std::uintptr_t>(array.data()) % kArrayAlignment != 0) {
    reject(name + " must start at a multiple of 64 bytes");
  }
  return arrays_.emplace_back(std::move(array));
}

float* ArrayArguments::floats(const std::string& name, nb::handle object) {
  const auto& array = add(name, object, Access::kWrite);
  if (!is_float32(array.dtype())) reject(name + " must be float32");
  return static_cast<float*>(const_cast<void*>(array.data()));
}

std::uint16_t* ArrayArguments::halves(const std::string& name, nb::handle object) {
  const auto& array = add(name, object, Access::kWrite);
  if (!is_uint16(array.dtype())) reject(name + " must be uint16: one half of a split master");
  return static_cast<std::uint16_t*>(const_cast<void*>(array.data()));
}

StateArrays ArrayArguments::state(nb::handle master, const std::vector<nb::object>& arrays) {
  StateArrays state;
  if (nb::isinstance<nb::tuple>(master)) {
    const auto pair = nb::borrow<nb::tuple>(master);
    if (pair.size() != 2) reject("master must be one array, or a pair of upper and lower halves");
    state.high = halves("master[0]", pair[0]);
    state.low = halves("master[1]", pair[1]);
  } else {
    state.master = floats("master", master);
  }
  if (arrays.empty() || arrays.size() > 2) {
    reject("arrays lists " + std::to_string(arrays.size()) + ": optimizers have 1 or 2");
  }
  for (std::size_t k = 0; k < arrays.size(); ++k) {
    state.arrays[k] = floats("arrays[" + std::to_string(k) + "]", arrays[k]);
  }
  return state;
}

const float* ArrayArguments::constant(const char* name, nb::handle object) {
  const auto& array = add(name, object, Access::kRead);
  if (!is_float32(array.dtype())) reject(std::string(name) + " must be float32");
  return static_cast<const float*>(array.data());
}

Gradients ArrayArguments::gradients(const char* name, const std::vector<nb::object>& objects) {
  if (objects.empty() || objects.size() > kMaxContributions) {
    reject(std::string(name) + " lists " + std::to_string(objects.size()) +
           " contributions: 1 to " + std::to_string(kMaxContributions) + " are possible");
  }
  Gradients gradients{};
  for (const nb::object& object : objects) {
    const std::string item =
        std::string(name) + "[" + std::to_string(gradients.contributions.count) + "]";
    const auto& array = add(item, object, Access::kRead);
    const GradType type = grad_type(item, array.dtype());
    if (gradients.contributions.count > 0 && type != gradients.type) {
      reject(item + " has another dtype than " + name + "[0]: contributions must agree");
    }
    gradients.type = type;
    gradients.contributions.data[gradients.contributions.count++] = array.data();
  }
  return gradients;
}

Weights ArrayArguments::weights(nb::handle object, WeightsType type) {
  const auto& array = add("weights", object, Access::kWrite);
  const bool wide = type == WeightsType::kFloat32;
  if (wide ? !is_float32(array.dtype()) : !is_uint16(array.dtype())) {
    reject(std::string("weights must be ") + (wide ? "float32" : "uint16") +
           " for this weights_dtype");
  }
  return Weights{type, const_cast<void*>(array.data())};
}

std::vector<StepRange> check_ranges(const std::vector<RangeTuple>& ranges,
                                    std::uint64_t num_elements) {
  std::vector<StepRange> checked;
  std::int64_t expected_start = 0;
  for (const auto& [start, end, weight_decay, rate] : ranges) {
    check_vectors("ranges", start, end, num_elements);
    if (start != expected_start) {
      reject("ranges has one that starts at " + text(start) + " where " + text(expected_start) +
             " was due: they must cover the block in order, without gaps");
    }
    if (!std::isfinite(weight_decay) || weight_decay < 0) {
      reject("ranges has weight decay " + std::to_string(weight_decay) +
             ": it must be finite and not negative");
    }
    if (!std::isfinite(rate) || rate <= 0) {
      reject("ranges has rate " + std::to_string(rate) + ": it must be finite and above 0");
    }
    checked.push_back(StepRange{static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(end),
                                weight_decay, rate});
    expected_start = end;
  }
  if (static_cast<std::uint64_t>(expected_start) != num_elements) {
    reject("ranges end at " + text(expected_start) + ", the arrays at " +
           std::to_string(num_elements));
  }
  return checked;
}

std::vector<Span> check_spans(const std::optional<std::vector<SpanTuple>>& spans,
                              std::uint64_t num_elements) {
  if (!spans.has_value()) return {Span{0, num_elements}};
  if (spans->empty()) reject("spans is empty: pass None for the whole block");
  std::vector<Span> checked;
  std::int64_t lowest_start = 0;
  for (const auto& [start, end] : *spans) {
    check_vectors("spans", start, end, num_elements);
    if (start < lowest_start) reject("spans must be sorted and must not overlap");
    checked.push_back(Span{static_cast<std::uint64_t>(start), static_cast<std::uint64_t>(end)});
    lowest_start = end;
  }
  return checked;
}

Undo check_undo(const BufferView& buffer) {
  if (reinterpret_cast<std::uintptr_t>(buffer.data()) % kArrayAlignment != 0) {
    reject("undo must start at a multiple of 64 bytes");
  }
  return Undo(buffer.data(), buffer.num_bytes());
}

std::size_t find_optimizer(const std::string& name) {
  std::string names;
  std::size_t index = 0;
  for (const OptimizerTraits& traits : Optimizers::kTraits) {
    if (name == traits.name) return index;
    names += (names.empty() ? "" : ", ") + std::string(traits.name);
    ++index;
  }
  reject("optimizer is '" + name + "': expected one of " + names);
}

void check_hyper(const Hyper& hyper) {
  const auto check = [](bool valid, const char* name, double value, const char* expected) {
    if (!valid)
      reject(std::string(name) + " is " + std::to_string(value) + ": it must be " + expected);
  };
  check(std::isfinite(hyper.lr) && hyper.lr >= 0, "lr", hyper.lr, "finite and not negative");
  check(hyper.beta1 >= 0 && hyper.beta1 < 1, "beta1", hyper.beta1, "in [0, 1)");
  check(hyper.beta2 >= 0 && hyper.beta2 < 1, "beta2", hyper.beta2, "in [0, 1)");
  check(std::isfinite(hyper.eps) && hyper.eps >= 0, "eps", hyper.eps, "finite and not negative");
  check(hyper.step >= 1, "step", static_cast<double>(hyper.step), "at least 1");
  check(std::isfinite(hyper.coefficient), "coefficient", hyper.coefficient, "finite");
}

void check_state(const StateArrays& state, const Hyper& hyper) {
  const std::size_t found = state.arrays[1] == nullptr ? 1 : 2;
  const std::size_t wanted = Optimizers::kTraits[hyper.optimizer].num_arrays;
  if (found != wanted) {
    reject("arrays lists " + std::to_string(found) + ": this optimizer has " +
           std::to_string(wanted));
  }
}

void check_weights(const StateArrays& state, const Weights& weights) {
  if (state.master == nullptr && weights.type != WeightsType::kBfloat16) {
    reject("weights_dtype must be BFLOAT16 where master is split: they are its upper halves");
  }
}

}  // namespace penstock
