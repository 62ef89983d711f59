#include "data/synthetic.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <numeric>

#include "core/error.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace sluice {

namespace {

/// Integers drawn for one document, one after the other. They are exact on every machine.
class Draws {
 public:
  Draws(const RandomStream& random, uint64_t document) : random_(random), next_(document << kBitsOfDraws) {}
  /// 0 ... n - 1; each as probable as the others to 2^-64 n.
  int64_t below(int64_t n) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<int64_t>((Wide{random_.bits(next_++)} * static_cast<Wide>(n)) >> 64);
  }

 private:
  static constexpr int kBitsOfDraws = 20;  // no document needs more
  const RandomStream& random_;
  uint64_t next_;
};

/// The first `count` of a random order of 0 ... n - 1 (Fisher and Yates).
class DistinctNumbers {
 public:
  DistinctNumbers(Draws& draws, int64_t n, int64_t count) {
    std::iota(numbers_.begin(), numbers_.begin() + n, 0);
    for (int64_t i = 0; i < count; ++i)
      std::swap(numbers_[static_cast<size_t>(i)], numbers_[static_cast<size_t>(i + draws.below(n - i))]);
  }
  int operator[](int64_t i) const { return numbers_[static_cast<size_t>(i)]; }

 private:
  std::array<int, 256> numbers_{};
};

double log_of(int64_t n) { return std::log(static_cast<double>(n)); }
/// -p ln p.
double surprise(double p) { return p > 0 ? -p * std::log(p) : 0; }

/// A distribution over bytes by their counts.
class ByteDistribution {
 public:
  ByteDistribution() = default;
  explicit ByteDistribution(const std::array<int64_t, 256>& counts) {
    for (size_t byte = 0; byte < counts.size(); ++byte) {
      if (counts[byte] == 0) continue;
      bytes_.push_back(static_cast<uint8_t>(byte));
      total_ += counts[byte];
      ends_.push_back(total_);
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      entropy_ += surprise(probability(i));
      largest_ = std::max(largest_, probability(i));
    }
  }
  size_t size() const { return bytes_.size(); }
  uint8_t byte(size_t i) const { return bytes_[i]; }
  double probability(size_t i) const {
    return static_cast<double>(ends_[i] - (i > 0 ? ends_[i - 1] : 0)) / static_cast<double>(total_);
  }
  double entropy() const { return entropy_; }
  double largest() const { return largest_; }
  uint8_t draw(Draws& draws) const {
    const auto at = std::upper_bound(ends_.begin(), ends_.end(), draws.below(total_));
    return bytes_[static_cast<size_t>(at - ends_.begin())];
  }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<int64_t> ends_;  // prefix sums of the counts
  int64_t total_ = 0;
  double entropy_ = 0, largest_ = 0;
};

void require(bool fits, const std::string& problem) {
  if (!fits) fail(ExitCode::usage, "{}", problem);
}

void require_bounds(const char* option, int64_t value, int64_t low, int64_t high, const char* because = "") {
  require(value >= low && value <= high,
          fmt::format("{} {}: must be from {} to {}{}", option, value, low, high, because));
}

/// A byte as it is shown to a user: 'e', or 0x0a.
std::string shown(uint8_t byte) {
  return byte > 32 && byte < 127 ? fmt::format("'{}'", static_cast<char>(byte))
         : byte == 32            ? "the space"
                                 : fmt::format("0x{:02x}", byte);
}

/// Bigram-Backcopy's process. At most one trigger stands behind a byte that is no trigger, since the byte
/// behind it is a copy of that byte.
class Backcopy {
 public:
  Backcopy(const BigramTable& table, const std::vector<uint8_t>& triggers) {
    for (const uint8_t byte : triggers) is_trigger_[byte] = true;
    std::array<int64_t, 256> first = table.bytes;
    for (size_t byte = 0; byte < 256; ++byte) {
      if (is_trigger_[byte]) first[byte] = 0;
      if (!is_trigger_[byte] && table.bytes[byte] > 0) next_[byte] = ByteDistribution(table.pairs[byte]);
    }
    first_ = ByteDistribution(first);
  }

  void write(Draws draws, int64_t length, uint8_t* out) const {
    out[0] = first_.draw(draws);
    for (int64_t i = 1; i < length; ++i)
      out[i] = is_trigger_[out[i - 1]] ? out[i - 2] : next_[out[i - 1]].draw(draws);
  }

  struct Expectation {
    PositionClass first{"first", "other"}, bigram{"bigram", "other"}, trigger;
    std::array<double, 256> queries{};  // how often each byte that is no trigger is followed by a drawn one
  };
  /// Exact: the distribution of a document's bytes, position by position.
  Expectation expect(int64_t length) const {
    Expectation e;
    e.first.positions = 1;
    e.first.nats = first_.entropy();
    e.first.hits = first_.largest();
    // Probabilities that a position holds this byte, which is no trigger; and that it holds a trigger behind
    // it.
    std::array<double, 256> plain{}, behind{};
    for (size_t i = 0; i < first_.size(); ++i) plain[first_.byte(i)] = first_.probability(i);
    for (int64_t position = 1; position < length; ++position) {
      std::array<double, 256> next = behind;  // copies
      for (size_t byte = 0; byte < 256; ++byte) {
        e.trigger.positions += behind[byte];
        behind[byte] = 0;
        const ByteDistribution& row = next_[byte];
        if (plain[byte] == 0) continue;
        e.queries[byte] += plain[byte];
        e.bigram.positions += plain[byte];
        e.bigram.nats += plain[byte] * row.entropy();
        e.bigram.hits += plain[byte] * row.largest();
        for (size_t i = 0; i < row.size(); ++i)
          (is_trigger_[row.byte(i)] ? behind[byte] : next[row.byte(i)]) += plain[byte] * row.probability(i);
      }
      plain = next;
    }
    e.trigger.name = e.trigger.query_class = "trigger";
    e.trigger.hits = e.trigger.positions;
    return e;
  }
  double trigger_share(uint8_t byte) const {
    double share = 0;
    for (size_t i = 0; i < next_[byte].size(); ++i)
      if (is_trigger_[next_[byte].byte(i)]) share += next_[byte].probability(i);
    return share;
  }

 private:
  std::array<bool, 256> is_trigger_{};
  std::array<ByteDistribution, 256> next_;  // empty for triggers and bytes that are not in the text
  ByteDistribution first_;
};

}  // namespace

PositionClass SyntheticTask::sum(const std::string& of_query_class) const {
  PositionClass sum;
  for (const PositionClass& c : classes) {
    if (!of_query_class.empty() && c.query_class != of_query_class) continue;
    sum.positions += c.positions;
    sum.nats += c.nats;
    sum.hits += c.hits;
  }
  return sum;
}

BigramTable count_bigrams(const unsigned char* text, int64_t size) {
  BigramTable table;
  for (int64_t i = 0; i < size; ++i) {
    ++table.pairs[text[i]][text[i + 1 < size ? i + 1 : 0]];
    ++table.bytes[text[i]];
  }
  return table;
}

std::vector<uint8_t> parse_triggers(const std::string& text, const BigramTable& table) {
  const auto present = std::count_if(table.bytes.begin(), table.bytes.end(), [](int64_t n) { return n > 0; });
  require(present >= 2, "the text has one byte only: at least two different ones are needed");
  const std::string form = fmt::format(
      "--triggers {}: must be auto:K, chars:TEXT or bytes:N,N,... as in auto:3, chars:te or bytes:116,101,32",
      text);
  std::vector<int64_t> numbers;
  const auto read_numbers = [&](size_t from) {
    const char *at = text.data() + from, *end = text.data() + text.size();
    while (true) {
      int64_t number = 0;
      const auto [rest, error] = std::from_chars(at, end, number);
      require(error == std::errc{} && (rest == end || *rest == ','), form);
      numbers.push_back(number);
      if (rest == end) return;
      at = rest + 1;
    }
  };
  std::vector<uint8_t> triggers;
  if (text.starts_with("auto:")) {
    read_numbers(5);
    require(numbers.size() == 1, form);
    require(
        numbers[0] >= 1 && numbers[0] < present,
        fmt::format("--triggers {}: K must be from 1 to {}, so that one of the text's {} different bytes is "
                    "no trigger",
                    text, present - 1, present));
    std::array<int, 256> order;
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return table.bytes[static_cast<size_t>(a)] > table.bytes[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < numbers[0]; ++i)
      triggers.push_back(static_cast<uint8_t>(order[static_cast<size_t>(i)]));
  } else if (text.starts_with("chars:")) {
    require(text.size() > 6, form);
    for (const char c : text.substr(6)) {
      require(
          static_cast<unsigned char>(c) < 128,
          fmt::format("--triggers {}: chars: takes ASCII characters only; give the bytes of others by number "
                      "(bytes:N,N,...)",
                      text));
      triggers.push_back(static_cast<uint8_t>(c));
    }
  } else {
    require(text.starts_with("bytes:"), form);
    read_numbers(6);
    for (const int64_t number : numbers) {
      require(number >= 0 && number < 256,
              fmt::format("--triggers {}: {} is no byte (0 to 255)", text, number));
      triggers.push_back(static_cast<uint8_t>(number));
    }
  }
  std::sort(triggers.begin(), triggers.end());
  for (size_t i = 0; i < triggers.size(); ++i) {
    require(i == 0 || triggers[i] != triggers[i - 1],
            fmt::format("--triggers {}: {} is given twice", text, shown(triggers[i])));
    require(table.bytes[triggers[i]] > 0,
            fmt::format("--triggers {}: {} does not occur in the text", text, shown(triggers[i])));
  }
  require(
      std::ssize(triggers) < present,
      fmt::format("--triggers {}: these are all of the text's bytes; one at least must be no trigger", text));
  return triggers;
}

SyntheticTask bigram_backcopy(const BigramTable& table, const std::vector<uint8_t>& triggers, int64_t length,
                              uint64_t seed) {
  require_bounds("--seq-len", length, 2, kLongestDocument);
  const auto process = std::make_shared<const Backcopy>(table, triggers);
  SyntheticTask task;
  task.name = "bigram-backcopy";
  task.length = length;
  task.parameters = {{"seed", seed}, {"triggers", triggers}};
  const Backcopy::Expectation e = process->expect(length);
  task.classes = {e.first, e.bigram, e.trigger};
  task.query_class = "trigger";
  task.query_tokens = triggers;

  const auto most =
      static_cast<size_t>(std::max_element(e.queries.begin(), e.queries.end()) - e.queries.begin());
  const auto byte = static_cast<uint8_t>(most);
  const double share = e.queries[most] / e.bigram.positions;
  const int64_t text = std::accumulate(table.bytes.begin(), table.bytes.end(), int64_t{0});
  if (share > 0.25 && process->trigger_share(byte) > 0.5)
    task.notes.push_back(fmt::format(
        "{} is the byte at {:.1f}% of the bigram positions, though it is {:.1f}% of the text: {:.1f}% of its "
        "successors are triggers, behind which it comes again. Other triggers give more varied documents",
        shown(byte), 100 * share, 100 * static_cast<double>(table.bytes[most]) / static_cast<double>(text),
        100 * process->trigger_share(byte)));

  task.document = [process, length, random = RandomStream(seed, "synthetic bigram-backcopy")](
                      uint64_t document, uint8_t* out) {
    process->write(Draws(random, document), length, out);
  };
  return task;
}

SyntheticTask associative_recall(const RecallOptions& o, uint64_t seed) {
  require_bounds("--keys", o.keys, 1, 255);
  require_bounds("--values", o.values, 1, 256 - o.keys, " (keys and values are bytes, 256 in sum)");
  require_bounds("--pairs", o.pairs, 1, o.keys, " (--keys: the keys of a document differ)");
  require_bounds("--queries", o.queries, 1, o.pairs, " (--pairs: each is asked for once at most)");
  SyntheticTask task;
  task.name = "associative-recall";
  task.length = 2 * (o.pairs + o.queries);
  task.parameters = {
      {"seed", seed}, {"keys", o.keys}, {"values", o.values}, {"pairs", o.pairs}, {"queries", o.queries}};
  const auto pairs = static_cast<double>(o.pairs), queries = static_cast<double>(o.queries);
  PositionClass key{"key", "other", pairs}, value{"value", "key", pairs}, query{"query", "other", queries},
      answer{"answer", "key", queries, 0, queries};
  for (int64_t i = 0; i < o.pairs; ++i) {
    key.nats += log_of(o.keys - i);
    key.hits += 1 / static_cast<double>(o.keys - i);
  }
  value.nats = pairs * log_of(o.values);
  value.hits = pairs / static_cast<double>(o.values);
  for (int64_t i = 0; i < o.queries; ++i) {
    query.nats += log_of(o.pairs - i);
    query.hits += 1 / static_cast<double>(o.pairs - i);
  }
  task.classes = {key, value, query, answer};
  task.query_class = "key";
  for (int64_t i = 0; i < o.keys; ++i) task.query_tokens.push_back(static_cast<uint8_t>(i));

  task.document = [o, random = RandomStream(seed, "synthetic associative-recall")](uint64_t document,
                                                                                   uint8_t* out) {
    Draws draws(random, document);
    const DistinctNumbers keys(draws, o.keys, o.pairs);
    for (int64_t i = 0; i < o.pairs; ++i) {
      out[2 * i] = static_cast<uint8_t>(keys[i]);
      out[2 * i + 1] = static_cast<uint8_t>(o.keys + draws.below(o.values));
    }
    const DistinctNumbers asked(draws, o.pairs, o.queries);
    for (int64_t i = 0; i < o.queries; ++i)
      std::copy_n(out + int64_t{2} * asked[i], 2, out + 2 * (o.pairs + i));
  };
  return task;
}

SyntheticTask induction(const InductionOptions& o, uint64_t seed) {
  require_bounds("--vocabulary", o.vocabulary, 2, 256);
  require_bounds("--longest-block", o.longest_block, 2, o.vocabulary,
                 " (--vocabulary: the tokens of a block differ)");
  require_bounds("--shortest-block", o.shortest_block, 2, o.longest_block, " (--longest-block)");
  require_bounds("--repeats", o.repeats, 2, kLongestDocument / o.longest_block,
                 fmt::format(" (documents of {} tokens at most)", kLongestDocument).c_str());
  SyntheticTask task;
  task.name = "induction";
  task.length = o.repeats * o.longest_block;
  task.parameters = {{"seed", seed},
                     {"vocabulary", o.vocabulary},
                     {"shortest_block", o.shortest_block},
                     {"longest_block", o.longest_block},
                     {"repeats", o.repeats}};
  PositionClass block{"block", "other", static_cast<double>(o.shortest_block)}, end{"end", "other"},
      repeat{"repeat", "other"};
  for (int64_t i = 0; i < o.shortest_block; ++i) {
    block.nats += log_of(o.vocabulary - i);
    block.hits += 1 / static_cast<double>(o.vocabulary - i);
  }
  // Where the block may end: a block that has not ended before position i ends there with probability h, and
  // the first token comes again; otherwise one of those that have not occurred.
  const auto lengths = static_cast<double>(o.longest_block - o.shortest_block + 1);
  for (int64_t i = o.shortest_block; i <= o.longest_block; ++i) {
    const auto left = static_cast<double>(o.longest_block - i + 1);
    const double reached = left / lengths, h = 1 / left;
    const auto unused = static_cast<double>(o.vocabulary - i);
    end.positions += reached;
    end.nats += reached * (surprise(h) + surprise(1 - h) + (h < 1 ? (1 - h) * std::log(unused) : 0));
    end.hits += reached * std::max(h, h < 1 ? (1 - h) / unused : 0);
  }
  repeat.positions = repeat.hits = static_cast<double>(task.length) - block.positions - end.positions;
  task.classes = {block, end, repeat};

  task.document = [o, length = task.length, random = RandomStream(seed, "synthetic induction")](
                      uint64_t document, uint8_t* out) {
    Draws draws(random, document);
    const int64_t block_length = o.shortest_block + draws.below(o.longest_block - o.shortest_block + 1);
    const DistinctNumbers tokens(draws, o.vocabulary, block_length);
    for (int64_t i = 0; i < length; ++i) out[i] = static_cast<uint8_t>(tokens[i % block_length]);
  };
  return task;
}

nlohmann::ordered_json describe(const SyntheticTask& task) {
  const auto json = [&](const PositionClass& c) {
    return nlohmann::ordered_json{{"share", c.positions / static_cast<double>(task.length)},
                                  {"entropy", c.entropy()},
                                  {"accuracy", c.accuracy()}};
  };
  nlohmann::ordered_json j = {{"task", task.name}, {"length", task.length}, {"parameters", task.parameters}};
  for (const PositionClass& c : task.classes) {
    j["positions"][c.name] = json(c);
    if (!task.query_class.empty()) j["queries"][c.query_class] = json(task.sum(c.query_class));
  }
  j["all"] = json(task.sum());
  return j;
}

void write_documents(const SyntheticTask& task, uint64_t first, int64_t count, const std::string& prefix) {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer({});
  const int64_t length = task.length, at_once = std::max<int64_t>((int64_t{4} << 20) / length, 1);
  std::vector<uint8_t> bytes(static_cast<size_t>(std::min(at_once, count) * length));
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  TokenFileWriter writer(prefix, tokenizer->vocab_size());
  TokenFileInfo info;
  for (int64_t begin = 0; begin < count; begin += at_once) {
    const int64_t documents = std::min(at_once, count - begin);
    parallel_for(documents, 64, [&](int64_t from, int64_t to) {
      for (int64_t d = from; d < to; ++d)
        task.document(first + static_cast<uint64_t>(begin + d), bytes.data() + d * length);
    });
    for (int64_t d = 0; d < documents; ++d) {
      std::copy_n(bytes.data() + d * length, length, tokens.data());
      info.largest_token =
          std::max<int64_t>(info.largest_token, *std::max_element(tokens.begin(), tokens.end()));
      writer.add_document(tokens.data(), length);
    }
  }
  writer.finish();
  info.tokenizer = tokenizer->fingerprint();
  info.tokenizer_name = "byte";
  info.vocab_size = tokenizer->vocab_size();
  info.end_of_document = tokenizer->end_of_document();
  info.documents = count;
  info.tokens = info.text_bytes = info.token_bytes = count * length;
  nlohmann::ordered_json synthetic = describe(task);
  synthetic["first_document"] = first;
  info.synthetic = synthetic.dump();
  write_token_file_info(prefix, info);
}

}  // namespace sluice
