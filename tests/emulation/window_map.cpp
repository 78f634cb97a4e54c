// The index maps of the window kernels, enumerated against what they mean.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <vector>

#include "cuda/conv_activation_moments_window_map.h"

namespace {

using namespace convnormpool;

void require(bool holds, const char* what) {
  if (holds) return;
  printf("FAIL %s\n", what);
  exit(1);
}

// Pieces cover every output once, and the lanes' accumulators every output of a piece once.
void test_pieces(const WindowGeometry& s, int32_t tiles, bool direct) {
  std::vector<int> seen(size_t(s.Z) * size_t(s.P) * size_t(s.Q), 0);
  for (int32_t i = 0; i < window_pieces(s); ++i) {
    const WindowPiece piece = window_piece(s, i);
    require(piece.planes > 0 && piece.columns > 0, "a piece is not empty");
    for (int32_t lane = 0; lane < 4; ++lane) {
      for (int32_t tile = 0; tile < tiles; ++tile) {
        for (int32_t accumulator = 0; accumulator < 2; ++accumulator) {
          const int32_t position = window_position(tile, accumulator, direct);
          if (position >= window_live(piece, lane, direct)) continue;
          const int32_t q = piece.q + position + (direct ? 8 : 2) * lane;
          require(q < s.Q, "a live accumulator is an output");
          for (int32_t z = piece.z; z < piece.z + piece.planes; ++z) {
            ++seen[(size_t(z) * size_t(s.P) + size_t(piece.p)) * size_t(s.Q) + size_t(q)];
          }
        }
      }
    }
  }
  for (const int count : seen) require(count == 1, "every output belongs to one accumulator");
}

// Cursors count the pieces of all samples, and move by any distance.
void test_cursors(const WindowGeometry& s) {
  const int32_t pieces = window_pieces(s);
  for (const int32_t distance : {1, 2, 7, 100, 1056}) {
    const WindowCursor stride = window_cursor(s, distance);
    WindowCursor at = window_cursor(s, 5);
    for (int32_t number = 5; number < 5 * pieces; number += distance) {
      require(window_number(s, at) == number, "a cursor's number");
      const WindowPiece piece = window_piece(s, at);
      const WindowPiece same = window_piece(s, number % pieces);
      require(piece.z == same.z && piece.planes == same.planes && piece.p == same.p &&
                  piece.q == same.q && piece.columns == same.columns,
              "a cursor's piece");
      at.advance(s, stride);
    }
  }
}

void test_units() {
  std::set<int32_t> seen;
  for (int32_t row = 0; row < 12; row += 4) {
    for (int32_t column = 0; column < 35; ++column) {
      for (int32_t i = 0; i < 4; ++i) {
        require(window_unit(row + i, column, 35) == window_unit(row, column, 35), "a unit's rows");
      }
      require(seen.insert(window_unit(row, column, 35)).second, "a unit has its own place");
    }
  }
  require(*seen.begin() == 0 && *seen.rbegin() == 3 * 35 - 1, "units lie without gaps");
}

// Whatever the number of workers, each piece of each sample is taken once.
void test_workers(int32_t samples, int32_t pieces, int32_t workers, int32_t per_sm) {
  std::vector<int> seen(size_t(samples) * size_t(pieces), 0);
  std::set<int32_t> places;
  const WindowStride stride(workers, pieces);
  for (int32_t block = 0; block < workers; ++block) {
    const int32_t place = window_place(block, workers, per_sm);
    require(place >= 0 && place < workers && places.insert(place).second, "places are different");
    int32_t sample = place / pieces, index = place % pieces;
    for (; sample < samples; stride.next(sample, index)) {
      require(index < pieces, "the index of a piece");
      ++seen[size_t(sample) * size_t(pieces) + size_t(index)];
    }
  }
  for (const int count : seen) require(count == 1, "each piece is taken once");
}

}  // namespace

int main() {
  for (const int32_t T : {1, 3, 4, 7}) {
    for (int32_t pad = 0; pad < T; ++pad) {
      for (const int32_t D : {1, 2, 5, 16}) {
        for (const int32_t slab : {1, 3, 4, 100}) {
          if (D + 2 * pad < T) continue;
          const int32_t Z = D + 2 * pad - T + 1;
          for (const int32_t Q : {1, 5, 29, 31, 32, 33, 64, 100}) {
            for (const int32_t tiles : {2, 4}) {
              const WindowGeometry s =
                  window_geometry(D, 3, Q, 16, Z, 3, Q, pad, 0, 0, slab, tiles);
              test_pieces(s, tiles, false);
              if (tiles == 4) test_pieces(s, tiles, true);
              test_cursors(s);
            }
          }
        }
      }
    }
  }
  test_units();
  for (const int32_t workers : {1, 5, 8, 24, 31, 1056}) {
    for (const int32_t pieces : {1, 7, 29, 2000}) test_workers(5, pieces, workers, 8);
  }
  puts("ok   index maps");
  return 0;
}
