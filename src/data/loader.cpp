#include "data/loader.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/io.h"
#include "core/random.h"
#include "core/targets.h"

namespace sluice {

namespace {

constexpr int64_t kCycle = 65536;

std::vector<std::string> expand(const DataSource& source) {
  const std::string& path = source.path;
  const bool pattern = path.find_first_of("*?[") != std::string::npos;
  if (!pattern || io::exists(path) || io::exists(path + ".bin")) return {path};
  std::vector<std::string> files = io::glob(path);
  std::erase_if(files, [](const std::string& file) { return !file.ends_with(".bin"); });
  if (files.empty()) {
    fail(ExitCode::no_input, "data source {}: no .bin file matches {} (made by: sluice tokenize)",
         source.name, path);
  }
  return files;
}

/// Index of the last entry of `starts` (which begins with 0) that is not above i.
int64_t place(const std::vector<int64_t>& starts, int64_t i) {
  return std::upper_bound(starts.begin(), starts.end() - 1, i) - starts.begin() - 1;
}

bool all_below(const int32_t* tokens, int64_t count, int64_t vocab_size) {
  constexpr int64_t kBlock = 16;
  // As unsigned numbers, negative tokens are the largest.
  const auto limit = static_cast<uint32_t>(std::min<int64_t>(vocab_size, int64_t{1} << 31));
  uint32_t bad = 0;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    for (int64_t j = 0; j < kBlock; ++j)
      bad |= static_cast<uint32_t>(static_cast<uint32_t>(tokens[i + j]) >= limit);
  }
  for (; i < count; ++i) bad |= static_cast<uint32_t>(static_cast<uint32_t>(tokens[i]) >= limit);
  return bad == 0;
}

}  // namespace

struct Blend::Source {
  std::string name;
  double weight = 0;  // as configured
  int64_t tokens = 0;
  int64_t unread = 0;     // in no sample in file order
  int64_t untrained = 0;  // in no sample of the shuffled stream
  int64_t files_untrained = 0;
  int64_t predicted = 0;  // tokens behind another one of their document
  int64_t per_cycle = 0;  // samples in one cycle of the schedule
  std::vector<TokenFile> files;
  std::vector<int64_t> samples{0}, sequential{0};  // prefix sums over files
  std::vector<PackedSamples> packed;               // with packing documents: of each file
  std::vector<int64_t> starts;  // with a begin token: of each sample in file order, in its file
  int64_t num_samples() const { return samples.back(); }

  /// Counts the samples of the last file, without a begin token.
  void add_pieces(int64_t seq_len) {
    const int64_t targets = files.back().num_tokens() - 1, whole = targets / seq_len;
    untrained += whole > 0 ? targets - whole * seq_len : targets + 1;
    samples.push_back(samples.back() + whole);
    sequential.push_back(sequential.back() + (targets + seq_len - 1) / seq_len);
  }
  /// Finds the samples of the last file, with one.
  void add_document_starts(int64_t seq_len) {
    const TokenFile& file = files.back();
    const int64_t tokens_of_file = file.num_tokens();
    int64_t end = 0, whole = 0;  // of the last sample; samples of seq_len tokens
    for (int64_t start = 0; start < tokens_of_file; start = file.next_document(end)) {
      unread += start - end;
      starts.push_back(start);
      end = std::min(start + seq_len, tokens_of_file);
      whole += end == start + seq_len;
    }
    unread += tokens_of_file - end;
    untrained += tokens_of_file - whole * seq_len;
    samples.push_back(samples.back() + whole);
    sequential.push_back(static_cast<int64_t>(starts.size()));
  }
  /// Packs the documents of the last file.
  void add_packed(int64_t seq_len) {
    const PackedSamples& samples_of_file = packed.emplace_back(files.back(), seq_len);
    unread += samples_of_file.unread();
    untrained += samples_of_file.unread();
    samples.push_back(samples.back() + samples_of_file.samples());
    sequential.push_back(samples.back());
  }
  /// First token of the i-th sample of a file, in file order.
  int64_t start(size_t file, int64_t i, int64_t seq_len) const {
    return starts.empty() ? i * seq_len : starts[static_cast<size_t>(sequential[file] + i)];
  }
};

Blend::~Blend() = default;

Blend::Blend(const std::vector<DataSource>& sources, const Config& config)
    : Blend(sources, config.data.seq_len, config.model.vocab_size, config.data.document_mask,
            config.train.seed, config.data.begin_token, config.data.packing, config.data.document_positions) {
}

Blend::Blend(const std::vector<DataSource>& sources, int64_t seq_len, int64_t vocab_size, bool document_mask,
             uint64_t seed, std::optional<int64_t> begin_token, Packing packing, bool document_positions)
    : seq_len_(seq_len),
      vocab_size_(vocab_size),
      packing_(packing),
      document_mask_(document_mask),
      document_positions_(document_positions),
      seed_(seed) {
  SLUICE_CHECK(packing == Packing::stream || !begin_token, "Blend: packed documents have no begin token");
  SLUICE_CHECK(document_mask || !document_positions, "Blend: positions of documents without their mask");
  SLUICE_CHECK(seq_len > 0 && vocab_size > 0, "Blend: seq_len {} and vocab_size {} must be positive", seq_len,
               vocab_size);
  if (begin_token) {
    SLUICE_CHECK(*begin_token >= 0 && *begin_token < vocab_size,
                 "Blend: begin token {} of a vocabulary of {}", *begin_token, vocab_size);
    begin_token_ = static_cast<int32_t>(*begin_token);
  }
  if (sources.empty()) fail(ExitCode::usage, "data: no source is given");
  for (const DataSource& source : sources) open(source);
  make_schedule();
}

void Blend::open(const DataSource& config) {
  auto source = std::make_unique<Source>();
  source->name = config.name.empty() ? config.path : config.name;
  source->weight = config.weight;
  for (const std::string& path : expand(config)) {
    const TokenFile& file = source->files.emplace_back(path);
    source->tokens += file.num_tokens();
    source->predicted += file.num_tokens() - file.num_filled_documents();
    if (packing_ == Packing::documents)
      source->add_packed(seq_len_);
    else if (begin_token_)
      source->add_document_starts(seq_len_);
    else
      source->add_pieces(seq_len_);
    source->files_untrained += source->samples.back() == *(source->samples.end() - 2);
  }
  const char* plural = source->files.size() == 1 ? "" : "s";
  if (source->num_samples() == 0 && begin_token_) {
    fail(ExitCode::data,
         "data source {} ({}): {} tokens in {} file{}, but one sample needs {} in one file from the start of "
         "a "
         "document on (data.seq_len with data.begin_token)",
         source->name, config.path, source->tokens, source->files.size(), plural, seq_len_);
  }
  if (source->num_samples() == 0 && packing_ == Packing::stream) {
    fail(
        ExitCode::data,
        "data source {} ({}): {} tokens in {} file{}, but one sample needs {} in one file (data.seq_len + 1)",
        source->name, config.path, source->tokens, source->files.size(), plural, seq_len_ + 1);
  }
  // With a begin token the first token of a sample is predicted at least.
  const bool packs = packing_ == Packing::documents;
  if ((document_mask_ || packs) && source->predicted == 0 && !begin_token_) {
    fail(ExitCode::data,
         "data source {} ({}): its {} documents are one token each, so with data.{} nothing is "
         "left to predict: set data.{}, or tokenize text with longer documents",
         source->name, config.path, source->tokens, packs ? "packing: documents" : "document_mask",
         packs ? "packing=stream" : "document_mask=false");
  }
  sources_.push_back(std::move(source));
}

// Quotas of a cycle by largest remainder, laid out by Tijdeman's rule for the chairman assignment problem
// (Discrete Mathematics 32, 1980): after any number of samples every source is within 1 - 1/(2k - 2) of its
// due.
void Blend::make_schedule() {
  double total = 0;
  for (const auto& source : sources_) {
    if (!(source->weight >= 0) || !std::isfinite(source->weight)) {
      fail(ExitCode::usage, "data source {}: weight {} is not a number of 0 or more", source->name,
           source->weight);
    }
    total += source->weight;
  }
  if (!(total > 0) || !std::isfinite(total))
    fail(ExitCode::usage, "data: the weights of all sources sum to {}", total);

  std::vector<size_t> order(sources_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  int64_t left = kCycle;
  for (auto& source : sources_) {
    source->per_cycle = static_cast<int64_t>(std::floor(source->weight / total * kCycle));
    left -= source->per_cycle;
  }
  const auto remainder = [&](size_t s) {
    return sources_[s]->weight / total * kCycle - static_cast<double>(sources_[s]->per_cycle);
  };
  std::vector<double> remainders;
  for (size_t s = 0; s < sources_.size(); ++s) remainders.push_back(remainder(s));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return remainders[a] > remainders[b]; });
  for (size_t i = 0; left > 0; i = (i + 1) % order.size(), --left) ++sources_[order[i]]->per_cycle;

  std::vector<size_t> active;
  for (size_t s = 0; s < sources_.size(); ++s) {
    const Source& source = *sources_[s];
    if (source.per_cycle > 0) active.push_back(s);
    if (source.per_cycle == 0 && source.weight > 0) {
      fail(ExitCode::usage,
           "data source {}: weight {} is too small beside the total of {} (1/131,072 of it is the least)",
           source.name, source.weight, total);
    }
  }

  schedule_.resize(kCycle);
  earlier_.resize(kCycle);
  const int64_t d = std::max<int64_t>(1, 2 * static_cast<int64_t>(active.size()) - 2);
  std::vector<int64_t> taken(sources_.size(), 0);
  for (int64_t n = 1; n <= kCycle; ++n) {
    // Among the sources that may take a sample without getting too far ahead, the one that would fall too far
    // behind soonest: the least (taken + 1 - 1/d) / share, compared as fractions.
    size_t best = active[0];
    int64_t best_deadline = -1, best_share = 1;
    for (const size_t s : active) {
      const int64_t share = sources_[s]->per_cycle;
      if (d * (n * share - kCycle * taken[s]) < kCycle && active.size() > 1) continue;
      const int64_t deadline = taken[s] * d + d - 1;
      if (best_deadline < 0 || deadline * best_share < best_deadline * share) {
        best = s;
        best_deadline = deadline;
        best_share = share;
      }
    }
    schedule_[static_cast<size_t>(n - 1)] = static_cast<uint16_t>(best);
    earlier_[static_cast<size_t>(n - 1)] = static_cast<uint16_t>(taken[best]++);
  }
  for (const size_t s : active) {
    SLUICE_CHECK(taken[s] == sources_[s]->per_cycle, "Blend: schedule gives source {} {} samples, not {}", s,
                 taken[s], sources_[s]->per_cycle);
  }
}

Blend::Origin Blend::origin(int64_t sample) const {
  SLUICE_CHECK(sample >= 0, "Blend: sample {}", sample);
  const auto at = static_cast<size_t>(sample % kCycle);
  const int s = schedule_[at];
  const Source& source = *sources_[static_cast<size_t>(s)];
  const int64_t index = sample / kCycle * source.per_cycle + earlier_[at];  // of this source's samples
  const int64_t epoch = index / source.num_samples();
  // A separate key for every epoch of every source.
  const uint64_t key =
      RandomStream(seed_, uint64_t{0xda7a0000} + static_cast<uint64_t>(s)).bits(static_cast<uint64_t>(epoch));
  const uint64_t chunk = permute_index(static_cast<uint64_t>(index % source.num_samples()),
                                       static_cast<uint64_t>(source.num_samples()), key);
  return {s, epoch, static_cast<int64_t>(chunk)};
}

// Row of up to seq_len inputs from token `begin`, or from the begin token before it: fewer where the file
// ends, and the rest is padding.
void Blend::fill_row(const TokenFile& file, int64_t begin, int64_t row, int32_t* tokens, int32_t* targets,
                     int32_t* positions, int32_t* first_key) const {
  const int64_t base = row * seq_len_;
  tokens += base, targets += base, positions += base, first_key += base;
  // The target of input i is token begin + i + ahead of the file.
  const int64_t ahead = begin_token_ ? 0 : 1;
  const int64_t inputs = std::min(seq_len_, file.num_tokens() - ahead - begin);
  file.read(begin, inputs, tokens);
  file.read(begin + inputs - 1 + ahead, 1, &targets[inputs - 1]);
  if (!all_below(tokens, inputs, vocab_size_) || !all_below(&targets[inputs - 1], 1, vocab_size_)) {
    int64_t i = 0;
    while (all_below(i < inputs ? &tokens[i] : &targets[inputs - 1], 1, vocab_size_)) ++i;
    refuse_token(file, begin + i);
  }
  std::memcpy(targets, tokens + ahead, static_cast<size_t>(inputs - 1) * sizeof(int32_t));
  if (begin_token_) {
    std::memmove(tokens + 1, tokens, static_cast<size_t>(inputs - 1) * sizeof(int32_t));
    tokens[0] = *begin_token_;
  }
  std::fill(tokens + inputs, tokens + seq_len_, 0);
  std::fill(targets + inputs, targets + seq_len_, kPadding);
  std::iota(positions, positions + seq_len_, 0);
  std::fill(first_key, first_key + seq_len_, static_cast<int32_t>(base));
  if (!document_mask_) return;
  const int64_t first = begin_token_ ? begin - 1 : begin;  // where input 0 would lie in the file
  for (int64_t i = 0; i < inputs;) {
    // The begin token belongs to the document behind it.
    const int64_t document_end = file.document_end(std::max(first + i, begin)) - first;
    const int64_t end = std::min(inputs, document_end);
    std::fill(first_key + i, first_key + (end == inputs ? seq_len_ : end), static_cast<int32_t>(base + i));
    // The target of the document's last token begins another one.
    if (end == document_end) targets[end - 1] = kNoTarget;
    i = end;
  }
  if (document_positions_)
    for (int64_t i = 0; i < seq_len_; ++i) positions[i] = static_cast<int32_t>(base + i) - first_key[i];
}

void Blend::fill_packed_row(const TokenFile& file, std::span<const Piece> pieces, int64_t row,
                            int32_t* tokens, int32_t* targets, int32_t* positions, int32_t* first_key) const {
  const int64_t base = row * seq_len_;
  tokens += base, targets += base, positions += base, first_key += base;
  std::fill(tokens, tokens + seq_len_, 0);
  std::fill(targets, targets + seq_len_, kPadding);
  std::iota(positions, positions + seq_len_, 0);
  std::fill(first_key, first_key + seq_len_, static_cast<int32_t>(base));
  int64_t at = 0;
  const auto begin_document = [&](int64_t end) {
    if (document_mask_) std::fill(first_key + at, first_key + end, static_cast<int32_t>(base + at));
    if (document_positions_) std::iota(positions + at, positions + end, 0);
  };
  for (const Piece& piece : pieces) {
    const int64_t n = piece.length;
    file.read(piece.begin, n, tokens + at);
    std::memcpy(targets + at, tokens + at + 1, static_cast<size_t>(n - 1) * sizeof(int32_t));
    targets[at + n - 1] = kNoTarget;
    if (piece.begin + n < file.document_end(piece.begin)) file.read(piece.begin + n, 1, &targets[at + n - 1]);
    if (!all_below(tokens + at, n, vocab_size_) ||
        (targets[at + n - 1] != kNoTarget && !all_below(&targets[at + n - 1], 1, vocab_size_))) {
      int64_t i = 0;
      while (i < n && all_below(&tokens[at + i], 1, vocab_size_)) ++i;
      refuse_token(file, piece.begin + i);
    }
    begin_document(at + n);
    at += n;
  }
  begin_document(seq_len_);  // padding sees itself alone
}

void Blend::refuse_token(const TokenFile& file, int64_t at) const {
  fail(ExitCode::data,
       "{}.bin: token {} is {}, outside the vocabulary of {}; was it made with another tokenizer?",
       file.prefix(), at, file.token(at), vocab_size_);
}

void Blend::fill_row_of(const Source& source, size_t file, int64_t i, int64_t row, int32_t* tokens,
                        int32_t* targets, int32_t* positions, int32_t* first_key) const {
  if (packing_ == Packing::documents)
    return fill_packed_row(source.files[file], source.packed[file].pieces(i), row, tokens, targets, positions,
                           first_key);
  fill_row(source.files[file], source.start(file, i, seq_len_), row, tokens, targets, positions, first_key);
}

void Blend::fill(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets, int32_t* positions,
                 int32_t* first_key) const {
  for (int64_t row = 0; row < count; ++row) {
    const Origin from = origin(first_sample + row);
    const Source& source = *sources_[static_cast<size_t>(from.source)];
    const auto f = static_cast<size_t>(place(source.samples, from.chunk));
    fill_row_of(source, f, from.chunk - source.samples[f], row, tokens, targets, positions, first_key);
  }
}

Blend::Place Blend::place_of(int64_t sequential_sample) const {
  SLUICE_CHECK(sequential_sample >= 0, "Blend: sample {}", sequential_sample);
  int64_t sample = sequential_sample;
  for (const auto& source : sources_) {
    if (sample < source->sequential.back()) {
      const auto f = static_cast<size_t>(place(source->sequential, sample));
      return {source.get(), f, sample - source->sequential[f]};
    }
    sample -= source->sequential.back();
  }
  return {};
}

bool Blend::whole(int64_t sequential_sample) const {
  const auto [source, file, sample] = place_of(sequential_sample);
  if (!source) return false;
  if (packing_ == Packing::documents) return source->packed[file].whole(sample);
  return source->start(file, sample, seq_len_) + seq_len_ + (begin_token_ ? 0 : 1) <=
         source->files[file].num_tokens();
}

void Blend::fill_sequential(int64_t first_sample, int64_t count, int32_t* tokens, int32_t* targets,
                            int32_t* positions, int32_t* first_key) const {
  for (int64_t row = 0; row < count; ++row) {
    if (const Place place = place_of(first_sample + row); place.source) {
      fill_row_of(*place.source, place.file, place.sample, row, tokens, targets, positions, first_key);
      continue;
    }
    const int64_t base = row * seq_len_;
    std::fill_n(tokens + base, seq_len_, 0);
    std::fill_n(targets + base, seq_len_, kPadding);
    std::iota(positions + base, positions + base + seq_len_, 0);
    std::fill_n(first_key + base, seq_len_, static_cast<int32_t>(base));
  }
}

int64_t Blend::num_sequential_samples() const {
  int64_t sum = 0;
  for (const auto& source : sources_) sum += source->sequential.back();
  return sum;
}

int64_t Blend::num_tokens() const {
  int64_t sum = 0;
  for (const auto& source : sources_) sum += source->tokens;
  return sum;
}

std::vector<Blend::SourceInfo> Blend::sources() const {
  std::vector<SourceInfo> infos;
  for (const auto& source : sources_) {
    std::vector<std::string> prefixes;
    for (const TokenFile& file : source->files) prefixes.push_back(file.prefix());
    std::optional<double> padding;
    for (const PackedSamples& packed : source->packed)
      padding = padding.value_or(0) + static_cast<double>(packed.padding()) /
                                          static_cast<double>(source->sequential.back() * seq_len_);
    infos.push_back({source->name, static_cast<int64_t>(source->files.size()), source->tokens,
                     source->num_samples(), static_cast<double>(source->per_cycle) / kCycle,
                     text_loss(prefixes), source->unread, padding, source->untrained,
                     source->files_untrained});
  }
  return infos;
}

std::string Blend::SourceInfo::describe_unread() const {
  // What packing leaves out are documents of one token, in which nothing is predicted.
  if (padding) return *padding > 0 ? fmt::format("  {:.2g}% padding (data.packing)", 100 * *padding) : "";
  if (unread == 0) return "";
  return fmt::format("  {:.3g}% of them in no sample (data.begin_token)",
                     100 * static_cast<double>(unread) / static_cast<double>(tokens));
}

std::string Blend::SourceInfo::describe_untrained() const {
  // The rest of a long file is not worth a word.
  constexpr double kLeast = 0.001;
  const double share = static_cast<double>(untrained) / static_cast<double>(tokens);
  std::string text;
  if (!padding && share >= kLeast) text += fmt::format("  {:.3g}% of them in no sample", 100 * share);
  if (padding && *padding > 0) text += fmt::format("  {:.2g}% padding (data.packing)", 100 * *padding);
  if (files_untrained > 0) text += fmt::format("  {} of {} files without a sample", files_untrained, files);
  return text;
}

const std::vector<TokenFile>& Blend::files(size_t source) const { return sources_.at(source)->files; }

std::vector<std::pair<std::string, double>> Blend::epochs(int64_t samples) const {
  std::vector<int64_t> taken(sources_.size(), 0);
  for (int64_t i = 0; i < samples % kCycle; ++i) ++taken[schedule_[static_cast<size_t>(i)]];
  std::vector<std::pair<std::string, double>> epochs;
  for (size_t s = 0; s < sources_.size(); ++s) {
    const int64_t read = samples / kCycle * sources_[s]->per_cycle + taken[s];
    epochs.emplace_back(sources_[s]->name,
                        static_cast<double>(read) / static_cast<double>(sources_[s]->num_samples()));
  }
  return epochs;
}

int64_t Blend::num_bytes() const {
  int64_t sum = 0;
  for (const auto& source : sources_)
    for (const TokenFile& file : source->files) sum += file.bytes();
  return sum;
}

int64_t Blend::modified() const {
  int64_t newest = 0;
  for (const auto& source : sources_)
    for (const TokenFile& file : source->files) newest = std::max<int64_t>(newest, file.identity().modified);
  return newest;
}

const std::string& Blend::fingerprint() const {
  std::call_once(fingerprint_taken_, [this] {
    fingerprint_ =
        hashed_whole() ? "xxh3-whole:" + hash_of_files(&TokenFile::fingerprint) : sampled_fingerprint();
  });
  return fingerprint_;
}

std::string Blend::sampled_fingerprint() const {
  return "xxh3:" + hash_of_files(&TokenFile::sampled_fingerprint);
}

std::string Blend::hash_of_files(std::string (TokenFile::*of_file)() const) const {
  std::string all;
  for (const auto& source : sources_) {
    for (const TokenFile& file : source->files) all += (file.*of_file)() + "\n";
    all += "\n";
  }
  const auto hash = XXH3_128bits(all.data(), all.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace sluice
