#include "undo.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace penstock {
namespace {

constexpr std::uint64_t kUndoFormat = 0x3130'4f44'4e55'5350;  // "PSUNDO01"
constexpr std::uint64_t kIdle = 0;
constexpr std::uint64_t kArmed = 1;     // + table
constexpr std::uint64_t kRepaired = 3;  // + table
constexpr std::uint64_t kLastState = 4;

bool is_repaired(std::uint64_t state) { return state >= kRepaired; }
std::size_t table_of(std::uint64_t state) { return (state - kArmed) & 1; }

// A release store: everything before it is in memory before it. Nothing else is needed, see undo.h.
void publish(std::uint64_t& word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

// The slot of the vector to put back, null when the piece was not begun.
const UndoSlot* last_saved(const UndoPiece& piece) {
  const UndoSlot& slot = piece.slots[piece.slots[1].position > piece.slots[0].position ? 1 : 0];
  if (slot.position == 0) return nullptr;
  const std::uint64_t element = slot.position - 1;
  if (element < piece.start || element >= piece.end || element % kVector != 0) {
    throw std::invalid_argument("undo area is damaged: saved element " + std::to_string(element) +
                                " lies outside its piece " + std::to_string(piece.start) + ".." +
                                std::to_string(piece.end));
  }
  return &slot;
}

// The halves are those that load_split() of the vector types joins.
void put_back(const UndoSlot& slot, const StateArrays& state, std::uint64_t element) {
  if (state.master != nullptr) {
    std::memcpy(state.master + element, slot.master, sizeof(slot.master));
  } else {
    std::uint32_t bits[kVector];
    std::memcpy(bits, slot.master, sizeof(bits));
    for (std::size_t j = 0; j < kVector; ++j) {
      state.high[element + j] = static_cast<std::uint16_t>((bits[j] + 0x8000u) >> 16);
      state.low[element + j] = static_cast<std::uint16_t>(bits[j]);
    }
  }
  for (std::size_t k = 0; k < 2; ++k) {
    if (state.arrays[k] == nullptr) continue;
    std::memcpy(state.arrays[k] + element, slot.arrays[k], sizeof(slot.arrays[k]));
  }
}

}  // namespace

Undo::Undo(void* data, std::size_t num_bytes) : header_(static_cast<UndoHeader*>(data)) {
  if (num_bytes < bytes_for(1)) {
    throw std::invalid_argument("undo has " + std::to_string(num_bytes) +
                                " bytes, one thread needs " + std::to_string(bytes_for(1)) +
                                ": see undo_bytes()");
  }
  capacity_ = (num_bytes - sizeof(UndoHeader)) / (2 * sizeof(UndoPiece));
  const std::uint64_t state = load_state();
  if (state == kIdle) return;
  if (state > kLastState || header_->format != kUndoFormat ||
      header_->num_pieces[table_of(state)] > capacity_) {
    throw std::invalid_argument(
        "undo is not an undo area, or was written with another size or by another version");
  }
}

std::size_t Undo::bytes_for(std::size_t num_threads) {
  return sizeof(UndoHeader) + 2 * num_threads * sizeof(UndoPiece);
}

UndoState Undo::state() const {
  return UndoState{load_state() != kIdle, header_->tag, header_->completed};
}

void Undo::check_ready(const std::vector<Span>& spans, std::uint64_t num_elements,
                       std::uint64_t tag) const {
  if (spans.size() > capacity_) {
    throw std::invalid_argument("undo has room for " + std::to_string(capacity_) +
                                " pieces, spans has " + std::to_string(spans.size()) +
                                ": make it undo_bytes(that many) long");
  }
  const std::uint64_t state = load_state();
  if (state == kIdle) return;
  if (!is_repaired(state)) {
    throw std::runtime_error("undo is armed (tag " + std::to_string(header_->tag) +
                             "): a sweep was cut short; call repair() first");
  }
  if (tag != header_->tag || num_elements != header_->num_elements || !(spans == remaining())) {
    throw std::runtime_error("undo holds a repaired sweep (tag " + std::to_string(header_->tag) +
                             "): finish it with that tag and spans=repair(...) first");
  }
}

std::vector<UndoPiece*> Undo::arm(const std::vector<Span>& pieces, std::uint64_t num_elements,
                                  std::uint64_t tag) {
  const std::uint64_t state = load_state();
  const std::size_t which = state == kIdle ? 0 : 1 - table_of(state);
  std::vector<UndoPiece*> places;
  for (const Span& span : pieces) {
    UndoPiece* piece = table(which) + places.size();
    piece->start = span.start;
    piece->end = span.end;
    piece->slots[0].position = 0;
    piece->slots[1].position = 0;
    places.push_back(piece);
  }
  header_->num_pieces[which] = pieces.size();
  header_->num_elements = num_elements;
  header_->tag = tag;
  header_->format = kUndoFormat;
  publish(header_->state, kArmed + which);
  return places;
}

void Undo::disarm() {
  publish(header_->completed, header_->tag);
  publish(header_->state, kIdle);
}

std::vector<Span> Undo::repair(const StateArrays& state, std::uint64_t num_elements) {
  const std::uint64_t word = load_state();
  if (word == kIdle) return {};
  if (num_elements != header_->num_elements) {
    throw std::invalid_argument("undo belongs to arrays of " +
                                std::to_string(header_->num_elements) + " elements, not " +
                                std::to_string(num_elements));
  }
  const std::vector<Span> left = remaining();  // checks every piece before the first store
  const UndoPiece* pieces = table(table_of(word));
  for (std::size_t i = 0; i < left.size(); ++i) {
    const UndoSlot* slot = last_saved(pieces[i]);
    if (slot != nullptr) put_back(*slot, state, left[i].start);
  }
  publish(header_->state, kRepaired + table_of(word));
  return left;
}

UndoPiece* Undo::table(std::size_t which) const {
  return reinterpret_cast<UndoPiece*>(header_ + 1) + which * capacity_;
}

std::uint64_t Undo::load_state() const {
  return __atomic_load_n(&header_->state, __ATOMIC_ACQUIRE);
}

std::vector<Span> Undo::remaining() const {
  const std::size_t which = table_of(load_state());
  std::vector<Span> spans;
  for (std::size_t i = 0; i < header_->num_pieces[which]; ++i) {
    const UndoPiece& piece = table(which)[i];
    if (piece.start >= piece.end || piece.end > header_->num_elements) {
      throw std::invalid_argument("undo area is damaged: piece " + std::to_string(i) + " is " +
                                  std::to_string(piece.start) + ".." + std::to_string(piece.end));
    }
    const UndoSlot* slot = last_saved(piece);
    spans.push_back(Span{slot == nullptr ? piece.start : slot->position - 1, piece.end});
  }
  return spans;
}

}  // namespace penstock
