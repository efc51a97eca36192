// The undo area: what makes settle and advance survive SIGKILL at any instant.
//
// A sweep overwrites master and the optimizer's arrays in place, one vector of 16 parameters at a time.
// Before it writes a vector it saves the old values here, in memory that outlives the process.
// After a kill, repair() puts back the at most one half-written vector of every piece of the sweep
// and says which elements are still to do; settling those gives the bits of an undisturbed sweep.
//
// Layout (little endian, words of 8 bytes, base 64-byte aligned; all zero is a valid idle area):
//
//     +0    state         0 idle, 1 + t armed with table t, 3 + t repaired with table t; t = 0, 1
//     +8    tag           the caller's name for the sweep that was armed last
//     +16   completed     tag of the sweep that finished last
//     +24   format        kUndoFormat, once anything was armed
//     +32   num_elements  length of the arrays of the sweep
//     +40   num_pieces    of table 0
//     +48   num_pieces    of table 1
//     +56   unused
//     +64   table 0       capacity pieces of 576 bytes
//     ...   table 1       capacity pieces of 576 bytes
//
//     piece +0    start   first element of the piece
//           +8    end     one past its last element
//           +16   unused
//           +64   slot 0  old values of a vector with an even number (element / 16)
//           +320  slot 1  ... with an odd number
//
//     slot  +0    master[16]   +64  first array[16]   +128  second array[16]   (float32)
//           +192  position     0 empty, else 1 + first element of the saved vector
//
// Writers: the process that runs the sweep (each piece by one thread), later the process that
// repairs; never two at once. Readers: repair() and undo_state().
//
// Store order of a thread, for its vectors k = 0, 1, 2, ... (neighbours use different slots):
//
//     (1) old values of k -> slot k & 1
//     (2) that slot's position = k
//     (3) new values of k -> arrays
//
// with a barrier before and after each (2). A killed thread leaves a prefix of its stores in
// program order: stores become visible only after their instruction retired, and an interrupted
// CPU has retired exactly a prefix. So after a kill one of these holds:
//
//   a. Within (1) of k. Slot k & 1 holds a mixture under position k - 2, or is empty. The other
//      slot holds position k - 1 and the complete old values of k - 1, because its own (2) was
//      reached. Vector k is untouched, k - 1 finished or half written ((3) of k - 1 and (1) of k
//      may mix).
//   b. Between (2) of k and (1) of k + 1. Slot k & 1 holds position k and the complete old values
//      of k. Vector k is untouched, half written or finished.
//
// Let p be the higher position of the two slots: k - 1 in case a, k in case b. Its old values are
// complete; every vector before p is finished, because its (3) precedes (2) of p; every vector
// after p is untouched. Putting back p and continuing at p is therefore exact. A slot that is being
// overwritten never wins: the other position is higher, or (k = 0) both are empty and nothing was
// written at all.
//
// The area is armed by writing a whole table (starts, ends, empty slots) and the other header words
// first, `state` last, before any array is touched; it is disarmed after all threads finished, by
// writing `completed` and then `state`. A sweep that continues a repaired one fills the *other*
// table, while the old one still stands, and takes over with the single store of `state`; tag and
// num_elements must be the same. So repair, and the sweep after it, may themselves be killed at any
// instant: repair only copies from slots that nobody changes, and may run again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace penstock {

constexpr std::size_t kVector = 16;  // parameters per vector

struct alignas(64) UndoSlot {
  float master[kVector];
  float arrays[2][kVector];  // the second unused by optimizers that have one
  std::uint64_t position;
};

struct alignas(64) UndoPiece {
  std::uint64_t start;
  std::uint64_t end;
  UndoSlot slots[2];
};

struct alignas(64) UndoHeader {
  std::uint64_t state;
  std::uint64_t tag;
  std::uint64_t completed;
  std::uint64_t format;
  std::uint64_t num_elements;
  std::uint64_t num_pieces[2];
};

static_assert(sizeof(UndoHeader) == 64 && sizeof(UndoSlot) == 256 && sizeof(UndoPiece) == 576);
static_assert(offsetof(UndoSlot, position) == 192 && offsetof(UndoPiece, slots) == 64);

// Elements [start, end) of a block; both are multiples of 16.
struct Span {
  std::uint64_t start;
  std::uint64_t end;
  bool operator==(const Span& other) const { return start == other.start && end == other.end; }
};

// The arrays that a sweep overwrites. A split master has halves instead of `master`; its upper ones
// may be overwritten, too, by weights of a later version.
struct StateArrays {
  float* master = nullptr;
  std::uint16_t* high = nullptr;
  std::uint16_t* low = nullptr;
  float* arrays[2] = {};
};

struct UndoState {
  bool armed;  // a sweep was cut short (or still runs): repair before the next one
  std::uint64_t tag;
  std::uint64_t completed;
};

// A view of an undo area. The methods throw std::invalid_argument when the area cannot be what it
// should be, std::runtime_error when it is armed and must be repaired first.
class Undo {
 public:
  Undo(void* data, std::size_t num_bytes);

  static std::size_t bytes_for(std::size_t num_threads);
  std::size_t capacity() const { return capacity_; }
  UndoState state() const;

  // Throws unless a sweep over these spans may start now.
  void check_ready(const std::vector<Span>& spans, std::uint64_t num_elements,
                   std::uint64_t tag) const;
  // Records the pieces and arms; returns where each piece keeps its slots.
  std::vector<UndoPiece*> arm(const std::vector<Span>& pieces, std::uint64_t num_elements,
                              std::uint64_t tag);
  void disarm();

  // Puts back half-written vectors and returns what is left to do, in pieces; empty when idle.
  std::vector<Span> repair(const StateArrays& state, std::uint64_t num_elements);

 private:
  UndoPiece* table(std::size_t which) const;
  std::uint64_t load_state() const;
  std::vector<Span> remaining() const;

  UndoHeader* header_;
  std::size_t capacity_;
};

}  // namespace penstock
