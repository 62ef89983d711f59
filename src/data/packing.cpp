#include "data/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace sluice {

PackedSamples::PackedSamples(const TokenFile& file, int64_t seq_len) : seq_len_(seq_len) {
  std::vector<Piece> pieces;
  for (int64_t begin = 0; begin < file.num_tokens();) {
    const int64_t end = file.document_end(begin);
    if (end - begin == 1) ++unread_;
    for (int64_t at = begin; at + 1 < end; at += seq_len) pieces.push_back({at, std::min(seq_len, end - at)});
    begin = end;
  }
  std::vector<int64_t> order(pieces.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return pieces[static_cast<size_t>(a)].length > pieces[static_cast<size_t>(b)].length;
  });

  // Samples by the room that is left in them; sample_of is in the order of `pieces`.
  std::map<int64_t, std::vector<int64_t>> by_room;
  std::vector<int64_t> sample_of(pieces.size());
  int64_t count = 0;
  for (const int64_t i : order) {
    const int64_t length = pieces[static_cast<size_t>(i)].length;
    int64_t sample = count, room = seq_len;
    if (const auto fits = by_room.lower_bound(length); fits != by_room.end()) {
      room = fits->first;
      sample = fits->second.back();
      fits->second.pop_back();
      if (fits->second.empty()) by_room.erase(fits);
    } else {
      ++count;
    }
    sample_of[static_cast<size_t>(i)] = sample;
    if (room > length) by_room[room - length].push_back(sample);
  }
  for (const auto& [room, samples] : by_room) padding_ += room * static_cast<int64_t>(samples.size());

  // Numbered anew in the order of their first pieces, and the pieces sorted by sample.
  std::vector<int64_t> number(static_cast<size_t>(count), -1);
  int64_t next = 0;
  for (int64_t& sample : sample_of) {
    int64_t& n = number[static_cast<size_t>(sample)];
    if (n < 0) n = next++;
    sample = n;
  }
  firsts_.assign(static_cast<size_t>(count) + 1, 0);
  for (const int64_t sample : sample_of) ++firsts_[static_cast<size_t>(sample) + 1];
  std::partial_sum(firsts_.begin(), firsts_.end(), firsts_.begin());
  std::vector<int64_t> place(firsts_.begin(), firsts_.end() - 1);
  pieces_.resize(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i)
    pieces_[static_cast<size_t>(place[static_cast<size_t>(sample_of[i])]++)] = pieces[i];
}

std::span<const Piece> PackedSamples::pieces(int64_t sample) const {
  const int64_t first = firsts_.at(static_cast<size_t>(sample)),
                end = firsts_.at(static_cast<size_t>(sample) + 1);
  return std::span(pieces_).subspan(static_cast<size_t>(first), static_cast<size_t>(end - first));
}

bool PackedSamples::whole(int64_t sample) const {
  int64_t tokens = 0;
  for (const Piece& piece : pieces(sample)) tokens += piece.length;
  return tokens == seq_len_;
}

}  // namespace sluice
