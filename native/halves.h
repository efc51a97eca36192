// A master in two halves, rounded for a file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

// Writes the float32 numbers of two halves in bf16, rounded to nearest even. The upper halves are
// rounded half up in the bits, so they are those numbers, save in ties. Returns false, with any
// content of `out`, if an upper half is that of a zero, an infinity or a NaN: the carry into it can
// make each of them of a NaN, so the whole numbers have to be looked at.
bool round_halves(const std::uint16_t* high, const std::uint16_t* low, std::size_t count,
                  std::uint16_t* out);

}  // namespace penstock
