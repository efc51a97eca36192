#include "halves.h"

namespace penstock {

bool round_halves(const std::uint16_t* high, const std::uint16_t* low, std::size_t count,
                  std::uint16_t* out) {
  std::uint16_t doubtful = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t upper = high[i];
    // A tie was rounded up: the number before is even where this one is odd.
    const std::uint16_t tie = low[i] == 0x8000 ? 1 : 0;
    out[i] = static_cast<std::uint16_t>(upper & ~tie);
    const auto magnitude = static_cast<std::uint16_t>(upper << 1);
    const auto less_one = static_cast<std::uint16_t>(magnitude - 1);  // zero becomes the largest
    doubtful |= less_one >= 0xFEFF ? 1 : 0;
  }
  return doubtful == 0;
}

}  // namespace penstock
