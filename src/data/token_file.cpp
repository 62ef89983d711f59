#include "data/token_file.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/parallel_for.h"
#include "data/sample_pages.h"

namespace sluice {

namespace {

// Layout of .idx (README.md). The arrays follow the header without padding, so nothing in them is
// aligned.
constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr int64_t kVersionAt = 9, kDtypeAt = 17, kSequencesAt = 18, kBoundsAt = 26, kArraysAt = 34;
constexpr int kCodeU8 = 1, kCodeI32 = 4, kCodeU16 = 8;

template <class T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

// Widening copies in blocks of a fixed size, which compilers turn into vector code at -O2.
template <class T>
void widen(const unsigned char* in, int64_t count, int32_t* out) {
  constexpr int64_t kBlock = 16;
  T block[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    std::memcpy(block, in + i * static_cast<int64_t>(sizeof(T)), sizeof(block));
    for (int64_t j = 0; j < kBlock; ++j) out[i + j] = static_cast<int32_t>(block[j]);
  }
  for (; i < count; ++i) out[i] = static_cast<int32_t>(load<T>(in + i * static_cast<int64_t>(sizeof(T))));
}

/// Whether any of them is 0.
bool holds_zero(const int32_t* tokens, int64_t count) {
  constexpr int64_t kBlock = 16;
  int64_t i = 0;
  int32_t zero = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j) zero |= static_cast<int32_t>(tokens[i + j] == 0);
  }
  for (; i < count; ++i) zero |= static_cast<int32_t>(tokens[i] == 0);
  return zero != 0;
}

template <class T>  // unsigned
uint32_t largest(const unsigned char* in, int64_t count) {
  constexpr int64_t kBlock = 64 / sizeof(T);
  T best[kBlock] = {}, block[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    std::memcpy(block, in + i * static_cast<int64_t>(sizeof(T)), sizeof(block));
    for (int64_t j = 0; j < kBlock; ++j) best[j] = std::max(best[j], block[j]);
  }
  for (; i < count; ++i) best[0] = std::max(best[0], load<T>(in + i * static_cast<int64_t>(sizeof(T))));
  return *std::max_element(best, best + kBlock);
}

std::string hash_text(const void* data, int64_t bytes) {
  const auto hash = XXH3_128bits(data, static_cast<size_t>(bytes));
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

/// Size of the parts of a file that threads process. It is fixed, so that a hash of their hashes does not
/// depend on the number of threads.
constexpr int64_t kPart = int64_t{8} << 20;

/// Calls body(part, begin, bytes) for every part of a file, on all threads.
template <class Body>
void for_parts(int64_t size, Body&& body) {
  parallel_for((size + kPart - 1) / kPart, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i, i * kPart, std::min(kPart, size - i * kPart));
  });
}

std::string strip_extension(const std::string& path) {
  for (const char* extension : {".bin", ".idx"}) {
    if (path.size() > 4 && path.ends_with(extension)) return path.substr(0, path.size() - 4);
  }
  return path;
}

/// The header of an index, checked against the size of its file.
struct IndexHeader {
  int item_size = 0;                           // bytes of a token
  int64_t sequences = 0, document_bounds = 0;  // lengths of the arrays

  int64_t lengths_at() const { return kArraysAt; }
  int64_t pointers_at() const { return kArraysAt + 4 * sequences; }
  int64_t bounds_at() const { return kArraysAt + 12 * sequences; }
};

IndexHeader read_header(const unsigned char* d, int64_t size, const std::string& path) {
  if (size < kArraysAt) {
    fail(ExitCode::data, "{}: header: needs {} bytes, the file has {}; is it a truncated copy?", path,
         kArraysAt, size);
  }
  if (std::memcmp(d, kMagic, sizeof(kMagic)) != 0) {
    fail(ExitCode::data, "{}: magic at offset 0: not a Megatron index file", path);
  }
  if (const auto version = load<uint64_t>(d + kVersionAt); version != 1) {
    fail(ExitCode::data, "{}: version at offset {}: is {}, only 1 is supported", path, kVersionAt, version);
  }
  const int code = d[kDtypeAt];
  if (code != kCodeU8 && code != kCodeU16 && code != kCodeI32) {
    fail(ExitCode::data, "{}: dtype at offset {}: code {} is not supported (1 u8, 4 i32, 8 u16 are)", path,
         kDtypeAt, code);
  }

  const auto sequences = load<uint64_t>(d + kSequencesAt), bounds = load<uint64_t>(d + kBoundsAt);
  const auto room = static_cast<uint64_t>(size - kArraysAt);
  if (sequences == 0)
    fail(ExitCode::data, "{}: sequence count at offset {}: there are no sequences", path, kSequencesAt);
  if (sequences > room / 12) {
    fail(ExitCode::data, "{}: sequence count at offset {}: {} sequences do not fit in a file of {} bytes",
         path, kSequencesAt, sequences, size);
  }
  if (bounds < 2 || bounds > (room - 12 * sequences) / 8) {
    fail(ExitCode::data,
         "{}: document index length at offset {}: {} does not fit (2 or more entries, {} bytes left)", path,
         kBoundsAt, bounds, room - 12 * sequences);
  }
  // Multimodal files end with one more byte per sequence.
  const uint64_t rest = room - 12 * sequences - 8 * bounds;
  if (rest != 0 && rest != sequences) {
    fail(ExitCode::data, "{}: {} bytes at offset {} are unexpected", path, rest,
         kArraysAt + static_cast<int64_t>(12 * sequences + 8 * bounds));
  }
  return {.item_size = code == kCodeU8    ? 1
                       : code == kCodeU16 ? 2
                                          : 4,
          .sequences = static_cast<int64_t>(sequences),
          .document_bounds = static_cast<int64_t>(bounds)};
}

/// Checks that the sequences lie one behind the other in the file of tokens, and fill it.
void check_sequences(const unsigned char* d, const IndexHeader& header, const std::string& path,
                     const std::string& bin_path, int64_t bin_size) {
  // Bounded by the size of .bin at every step, so the sum cannot overflow.
  int64_t bytes = 0;
  for (int64_t s = 0; s < header.sequences; ++s) {
    const int64_t length_at = header.lengths_at() + 4 * s, pointer_at = header.pointers_at() + 8 * s;
    const auto length = load<int32_t>(d + length_at);
    const auto pointer = load<int64_t>(d + pointer_at);
    if (length <= 0) {
      fail(ExitCode::data, "{}: length of sequence {} at offset {}: {} is not positive", path, s, length_at,
           length);
    }
    if (pointer != bytes) {
      fail(ExitCode::data,
           "{}: start of sequence {} at offset {}: {}, but the sequences before it end at byte {}", path, s,
           pointer_at, pointer, bytes);
    }
    bytes += int64_t{length} * header.item_size;
    if (bytes > bin_size) {
      fail(ExitCode::data,
           "{}: sequence {} at offset {} ends at byte {} of {}, which has {} bytes; is it a truncated copy?",
           path, s, length_at, bytes, bin_path, bin_size);
    }
  }
  if (bytes != bin_size) {
    fail(ExitCode::data,
         "{}: sequences end at byte {}, but {} has {} bytes; do the two files belong together?", path, bytes,
         bin_path, bin_size);
  }
}

/// Checks that documents begin and end in order and contain all sequences; returns how many are not empty.
/// bound_of(i): entry i of the document index.
template <class BoundOf>
int64_t check_documents(const IndexHeader& header, const std::string& path, const BoundOf& bound_of) {
  int64_t last = 0, filled = 0;
  for (int64_t i = 0; i < header.document_bounds; ++i) {
    const int64_t bound = bound_of(i), at = header.bounds_at() + 8 * i;
    if (i == 0 && bound != 0) {
      fail(ExitCode::data, "{}: document index entry 0 at offset {}: {} instead of 0", path, at, bound);
    }
    filled += bound > last;
    if (bound < last || bound > header.sequences) {
      fail(ExitCode::data, "{}: document index entry {} at offset {}: {} is not in {}..{}", path, i, at,
           bound, last, header.sequences);
    }
    last = bound;
  }
  if (last != header.sequences) {
    const int64_t entry = header.document_bounds - 1;
    fail(ExitCode::data,
         "{}: document index entry {} at offset {}: the last document ends at sequence {} of {}", path, entry,
         header.bounds_at() + 8 * entry, last, header.sequences);
  }
  return filled;
}

}  // namespace

void refuse_text(const std::string& path) {
  const std::string prefix = strip_extension(path);
  if (io::exists(prefix + ".bin") || io::exists(prefix + ".idx")) return;
  for (const char* ending : {"", ".txt", ".jsonl", ".json", ".txt.gz", ".jsonl.gz"}) {
    const std::string text = prefix + ending;
    if (!io::exists(text) || io::is_directory(text)) continue;
    if (text.ends_with(".json") && describes_tokens(text)) continue;
    std::string output = text;
    for (const char* known : {".gz", ".txt", ".jsonl", ".json"})
      if (output.ends_with(known)) output.resize(output.size() - std::string(known).size());
    // PREFIX.json, which tokenizing writes, may be the text itself, or a tokenizer.
    if (output == text || io::exists(output + ".json")) output += ".tokens";
    fail(ExitCode::no_input,
         "there is no token file {}.bin; {} is text and has to be tokenized first:\n  sluice tokenize {} -o "
         "{}\nthen give its prefix: path: {}",
         prefix, text, text, output, output);
  }
}

TokenFile::TokenFile(const std::string& prefix)
    : prefix_((refuse_text(prefix), strip_extension(prefix))),
      bin_(prefix_ + ".bin"),
      idx_(prefix_ + ".idx") {
  check_index();
}

void TokenFile::check_index() {
  const unsigned char* d = idx_.data();
  const IndexHeader header = read_header(d, idx_.size(), idx_.path());
  item_size_ = header.item_size;
  sequences_ = header.sequences;
  document_bounds_ = header.document_bounds;
  check_sequences(d, header, idx_.path(), bin_.path(), bin_.size());
  tokens_ = bin_.size() / item_size_;
  filled_documents_ = check_documents(header, idx_.path(), [&](int64_t i) { return document_bound(i); });
  idx_.check(true);
}

int64_t TokenFile::num_tokens() const { return tokens_; }
int64_t TokenFile::num_sequences() const { return sequences_; }
int64_t TokenFile::num_documents() const { return document_bounds_ - 1; }

int64_t TokenFile::sequence_begin(int64_t sequence) const {
  SLUICE_CHECK(sequence >= 0 && sequence <= sequences_, "{}: sequence {} of {}", prefix_, sequence,
               sequences_);
  if (sequence == sequences_) return tokens_;
  const auto begin = load<int64_t>(idx_.data() + kArraysAt + 4 * sequences_ + 8 * sequence);
  idx_.check(begin == 0 && sequence > 0);
  return begin / item_size_;
}

int64_t TokenFile::document_bound(int64_t i) const {
  const auto bound = load<int64_t>(idx_.data() + kArraysAt + 12 * sequences_ + 8 * i);
  idx_.check(bound == 0 && i > 0);
  return bound;
}

int64_t TokenFile::document_of(int64_t token) const {
  SLUICE_CHECK(token >= 0 && token < tokens_, "{}: token {} of {}", prefix_, token, tokens_);
  int64_t low = 0, high = document_bounds_ - 1;  // begin(low) <= token < begin(high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (sequence_begin(document_bound(middle)) <= token ? low : high) = middle;
  }
  return low;
}

int64_t TokenFile::document_begin(int64_t token) const {
  return sequence_begin(document_bound(document_of(token)));
}
int64_t TokenFile::document_end(int64_t token) const {
  return sequence_begin(document_bound(document_of(token) + 1));
}

int64_t TokenFile::next_document(int64_t token) const {
  if (token <= 0) return 0;
  return token >= tokens_ ? tokens_ : document_end(token - 1);
}

int32_t TokenFile::token(int64_t i) const {
  int32_t value;
  read(i, 1, &value);
  return value;
}

void TokenFile::read(int64_t begin, int64_t count, int32_t* out) const {
  SLUICE_CHECK(begin >= 0 && count >= 0 && begin <= tokens_ - count, "{}: tokens {} + {} of {}", prefix_,
               begin, count, tokens_);
  const unsigned char* in = bin_.data() + begin * item_size_;
  if (item_size_ == 2) {
    widen<uint16_t>(in, count, out);
  } else if (item_size_ == 4) {
    std::memcpy(out, in, static_cast<size_t>(count) * 4);
  } else {
    widen<uint8_t>(in, count, out);
  }
  bin_.check(holds_zero(out, count));
}

std::string TokenFile::fingerprint() const {
  std::string hashes =
      fmt::format("{} {} {}\n", bin_.size(), idx_.size(), hash_text(idx_.data(), idx_.size()));
  const auto begin = static_cast<int64_t>(hashes.size());
  constexpr int64_t kHash = 32;
  hashes.resize(static_cast<size_t>(begin + (bin_.size() + kPart - 1) / kPart * kHash));
  for_parts(bin_.size(), [&](int64_t part, int64_t at, int64_t bytes) {
    hash_text(bin_.data() + at, bytes).copy(hashes.data() + begin + part * kHash, kHash);
  });
  bin_.check(true);
  idx_.check(true);
  return "xxh3-whole:" + hash_text(hashes.data(), std::ssize(hashes));
}

std::string TokenFile::sampled_fingerprint() const {
  const std::string sample =
      fmt::format("{} {} {}\n", bin_.size(), idx_.size(), hash_text(idx_.data(), idx_.size())) +
      sample_pages(bin_.data(), bin_.size());
  bin_.check(true);
  idx_.check(true);
  return "xxh3:" + hash_text(sample.data(), std::ssize(sample));
}

int32_t TokenFile::max_token() const {
  std::vector<uint32_t> found(static_cast<size_t>((bin_.size() + kPart - 1) / kPart));
  for_parts(bin_.size(), [&](int64_t part, int64_t at, int64_t bytes) {
    const unsigned char* in = bin_.data() + at;
    found[static_cast<size_t>(part)] = item_size_ == 2   ? largest<uint16_t>(in, bytes / 2)
                                       : item_size_ == 4 ? largest<uint32_t>(in, bytes / 4)
                                                         : largest<uint8_t>(in, bytes);
  });
  bin_.check(true);
  return static_cast<int32_t>(*std::max_element(found.begin(), found.end()));
}

int64_t TokenFile::find_outside(int64_t vocab_size) const {
  constexpr int64_t kBlock = 4096;
  int32_t block[kBlock];
  for (int64_t begin = 0; begin < tokens_; begin += kBlock) {
    const int64_t count = std::min(kBlock, tokens_ - begin);
    read(begin, count, block);
    const int32_t* end = block + count;
    const int32_t* at = std::find_if(static_cast<const int32_t*>(block), end,
                                     [&](int32_t t) { return t < 0 || t >= vocab_size; });
    if (at != end) return begin + (at - block);
  }
  return -1;
}

}  // namespace sluice
