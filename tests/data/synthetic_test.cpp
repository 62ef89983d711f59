// Synthetic tasks against their definitions: every possible document of tiny ones, statistics of larger ones.
#include "data/synthetic.h"

#include <xxhash.h>

#include <cmath>
#include <map>
#include <set>

#include "core/io.h"
#include "core/parallel_for.h"
#include "data/loader.h"
#include "data/token_check.h"
#include "temporary.h"

using namespace sluice;
using namespace sluice::test;

namespace {

using Document = std::vector<uint8_t>;
using Distribution = std::map<Document, double>;  // documents, and prefixes of documents, with probabilities
using ClassOf = std::function<std::string(const Document& before)>;

const std::string kText =
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, "
    "it "
    "was the season of Darkness, it was the spring of hope, it was the winter of despair.\n";

BigramTable table_of(const std::string& text) {
  return count_bigrams(reinterpret_cast<const unsigned char*>(text.data()), std::ssize(text));
}

Document document_of(const SyntheticTask& task, uint64_t number) {
  Document document(static_cast<size_t>(task.length));
  task.document(number, document.data());
  return document;
}

/// What task.classes must say, from the probabilities of all documents and the class of the position behind a
/// prefix.
std::map<std::string, PositionClass> slow_classes(const Distribution& documents, const ClassOf& class_of) {
  std::map<Document, std::map<uint8_t, double>> next;
  for (const auto& [document, probability] : documents)
    for (size_t i = 0; i < document.size(); ++i)
      next[Document(document.begin(), document.begin() + static_cast<ptrdiff_t>(i))][document[i]] +=
          probability;
  std::map<std::string, PositionClass> classes;
  for (const auto& [before, tokens] : next) {
    double reached = 0, largest = 0;
    for (const auto& [token, p] : tokens) {
      reached += p;
      largest = std::max(largest, p);
    }
    PositionClass& c = classes[class_of(before)];
    c.positions += reached;
    c.hits += largest;
    for (const auto& [token, p] : tokens) c.nats -= p * std::log(p / reached);
  }
  return classes;
}

/// Compares classes, and the frequencies of generated documents by chi-square.
void check_task(const SyntheticTask& task, const Distribution& documents, const ClassOf& class_of) {
  double total = 0;
  for (const auto& [document, probability] : documents) total += probability;
  REQUIRE(total == Approx(1));
  const auto expected = slow_classes(documents, class_of);
  REQUIRE(task.classes.size() == expected.size());
  for (const PositionClass& c : task.classes) {
    INFO(c.name);
    REQUIRE(expected.count(c.name) == 1);
    CHECK(c.positions == Approx(expected.at(c.name).positions));
    CHECK(c.nats == Approx(expected.at(c.name).nats).margin(1e-12));
    CHECK(c.hits == Approx(expected.at(c.name).hits));
  }
  CHECK(task.sum().positions == Approx(static_cast<double>(task.length)));

  constexpr int kDrawn = 40000;
  std::map<Document, int> drawn;
  for (uint64_t i = 0; i < kDrawn; ++i) ++drawn[document_of(task, i)];
  double chi_square = 0;
  for (const auto& [document, count] : drawn) REQUIRE(documents.count(document) == 1);
  for (const auto& [document, probability] : documents) {
    const double due = kDrawn * probability;
    const auto found = drawn.find(document);
    const double count = found == drawn.end() ? 0 : found->second;
    chi_square += (count - due) * (count - due) / due;
  }
  const auto degrees = static_cast<double>(documents.size() - 1);
  INFO("chi-square " << chi_square << " with " << degrees << " degrees of freedom");
  CHECK(std::abs(chi_square - degrees) < 4 * std::sqrt(2 * degrees));
}

/// Calls take with every ordered choice of `count` different numbers below n.
void for_choices(int n, size_t count, const std::function<void(const Document&)>& take,
                 const Document& so_far = {}) {
  if (so_far.size() == count) return take(so_far);
  for (int i = 0; i < n; ++i) {
    if (std::find(so_far.begin(), so_far.end(), i) != so_far.end()) continue;
    Document more = so_far;
    more.push_back(static_cast<uint8_t>(i));
    for_choices(n, count, take, more);
  }
}

std::string hash_of(const SyntheticTask& task) {
  Document all;
  for (const uint64_t first : {uint64_t{0}, kFirstValidationDocument})
    for (uint64_t i = 0; i < 50; ++i) {
      const Document document = document_of(task, first + i);
      all.insert(all.end(), document.begin(), document.end());
    }
  return fmt::format("{:016x}", XXH3_64bits(all.data(), all.size()));
}

SyntheticTask backcopy(uint64_t seed, int64_t length = 64, const std::string& triggers = "chars:s") {
  const BigramTable table = table_of(kText);
  return bigram_backcopy(table, parse_triggers(triggers, table), length, seed);
}

}  // namespace

TEST_CASE("bigrams are counted, the first byte behind the last one", "[synthetic]") {
  const BigramTable table = table_of("abac");
  CHECK(table.pairs['a']['b'] == 1);
  CHECK(table.pairs['b']['a'] == 1);
  CHECK(table.pairs['a']['c'] == 1);
  CHECK(table.pairs['c']['a'] == 1);
  CHECK(table.bytes['a'] == 2);
  int64_t sum = 0;
  for (size_t a = 0; a < 256; ++a) {
    int64_t row = 0;
    for (const int64_t n : table.pairs[a]) row += n;
    CHECK(row == table.bytes[a]);
    sum += row;
  }
  CHECK(sum == 4);
}

TEST_CASE("bigram-backcopy has the probabilities and entropies of its definition", "[synthetic]") {
  const std::string text = "abcabdacbbadcad";
  const BigramTable table = table_of(text);
  for (const std::string triggers : {"chars:c", "chars:da", "chars:bcd"}) {
    INFO(triggers);
    const std::vector<uint8_t> list = parse_triggers(triggers, table);
    const std::set<uint8_t> set(list.begin(), list.end());
    constexpr int kLength = 5;
    Distribution documents;
    const std::function<void(const Document&, double)> grow = [&](const Document& before,
                                                                  double probability) {
      if (probability == 0) return;
      if (before.size() == kLength) {
        documents[before] = probability;
        return;
      }
      double total = 0;
      std::map<uint8_t, double> weights;
      for (const char c : std::string("abcd")) {
        const auto byte = static_cast<uint8_t>(c);
        double weight = 0;
        if (before.empty())
          weight = set.count(byte) ? 0 : static_cast<double>(std::count(text.begin(), text.end(), c));
        else if (set.count(before.back()))
          weight = byte == before[before.size() - 2];
        else
          for (size_t i = 0; i < text.size(); ++i)
            weight += text[i] == static_cast<char>(before.back()) && text[(i + 1) % text.size()] == c;
        weights[byte] = weight;
        total += weight;
      }
      for (const auto& [byte, weight] : weights) {
        Document more = before;
        more.push_back(byte);
        grow(more, probability * weight / total);
      }
    };
    grow({}, 1);
    check_task(bigram_backcopy(table, list, kLength, 3), documents,
               [&](const Document& before) -> std::string {
                 return before.empty() ? "first" : set.count(before.back()) ? "trigger" : "bigram";
               });
  }
}

TEST_CASE("associative recall has the probabilities and entropies of its definition", "[synthetic]") {
  for (const RecallOptions o :
       {RecallOptions{3, 2, 2, 2}, RecallOptions{4, 1, 3, 2}, RecallOptions{2, 3, 2, 1}}) {
    INFO(o.keys << " keys, " << o.values << " values, " << o.pairs << " pairs, " << o.queries << " queries");
    const auto pairs = static_cast<size_t>(o.pairs), queries = static_cast<size_t>(o.queries);
    Distribution documents;
    for_choices(static_cast<int>(o.keys), pairs, [&](const Document& keys) {
      const auto values = static_cast<uint64_t>(std::llround(std::pow(o.values, o.pairs)));
      for (uint64_t v = 0; v < values; ++v)
        for_choices(static_cast<int>(o.pairs), queries, [&](const Document& asked) {
          Document document;
          uint64_t rest = v;
          for (const uint8_t key : keys) {
            document.push_back(key);
            document.push_back(static_cast<uint8_t>(o.keys + static_cast<int64_t>(rest) % o.values));
            rest /= static_cast<uint64_t>(o.values);
          }
          for (const uint8_t i : asked) {
            document.push_back(document[2 * size_t{i}]);
            document.push_back(document[2 * size_t{i} + 1]);
          }
          documents[document] += 1;
        });
    });
    double total = 0;
    for (const auto& [document, count] : documents) total += count;
    for (auto& [document, count] : documents) count /= total;
    const SyntheticTask task = associative_recall(o, 3);
    CHECK(task.length == 2 * (o.pairs + o.queries));
    check_task(task, documents, [&](const Document& before) -> std::string {
      const bool pair = before.size() < 2 * pairs;
      return before.size() % 2 == 0 ? (pair ? "key" : "query") : (pair ? "value" : "answer");
    });
    CHECK(task.classes.back().accuracy() == 1);
    CHECK(task.classes.back().nats == 0);
  }
}

TEST_CASE("induction has the probabilities and entropies of its definition", "[synthetic]") {
  for (const InductionOptions o :
       {InductionOptions{4, 2, 3, 2}, InductionOptions{4, 3, 3, 3}, InductionOptions{4, 2, 4, 2}}) {
    INFO(o.vocabulary << " tokens, blocks of " << o.shortest_block << " to " << o.longest_block);
    const auto length = static_cast<size_t>(o.repeats * o.longest_block);
    Distribution documents;
    for (int64_t block = o.shortest_block; block <= o.longest_block; ++block) {
      std::vector<Document> blocks;
      for_choices(static_cast<int>(o.vocabulary), static_cast<size_t>(block),
                  [&](const Document& tokens) { blocks.push_back(tokens); });
      for (const Document& tokens : blocks) {
        Document document;
        while (document.size() < length) document.insert(document.end(), tokens.begin(), tokens.end());
        document.resize(length);
        documents[document] += 1 / static_cast<double>(blocks.size()) /
                               static_cast<double>(o.longest_block - o.shortest_block + 1);
      }
    }
    check_task(induction(o, 3), documents, [&](const Document& before) -> std::string {
      const bool repeated = std::set<uint8_t>(before.begin(), before.end()).size() < before.size();
      return static_cast<int64_t>(before.size()) < o.shortest_block ? "block" : repeated ? "repeat" : "end";
    });
  }
}

TEST_CASE("a token that has occurred is followed by the same one again in induction", "[synthetic]") {
  const SyntheticTask task = induction({}, 4);
  REQUIRE(task.length == 256);
  double known = 0, right = 0;
  constexpr uint64_t kDocuments = 300;
  for (uint64_t d = 0; d < kDocuments; ++d) {
    std::map<uint8_t, uint8_t> after;
    const Document document = document_of(task, d);
    for (size_t i = 0; i + 1 < document.size(); ++i) {
      if (const auto found = after.find(document[i]); found != after.end()) {
        ++known;
        right += found->second == document[i + 1];
      }
      after[document[i]] = document[i + 1];
    }
  }
  CHECK(right == known);
  CHECK(task.classes[2].name == "repeat");
  CHECK(known / kDocuments == Approx(task.classes[2].positions).epsilon(0.02));
}

TEST_CASE("documents of bigram-backcopy follow the rule everywhere and the table's frequencies",
          "[synthetic]") {
  const BigramTable table = table_of(kText);
  constexpr int64_t kDocuments = 1000, kLength = 200;
  const SyntheticTask task = backcopy(11, kLength, "chars:s,");
  const std::set<uint8_t> triggers(task.query_tokens.begin(), task.query_tokens.end());
  std::map<uint8_t, std::map<uint8_t, double>> drawn;
  double trigger_queries = 0;
  for (uint64_t d = 0; d < kDocuments; ++d) {
    const Document document = document_of(task, d);
    REQUIRE(triggers.count(document[0]) == 0);
    for (size_t i = 1; i < document.size(); ++i) {
      if (triggers.count(document[i - 1])) {
        ++trigger_queries;
        REQUIRE(document[i] == document[i - 2]);
      } else {
        ++drawn[document[i - 1]][document[i]];
      }
    }
  }
  const PositionClass& trigger = task.classes[2];
  CHECK(trigger.name == "trigger");
  CHECK(trigger_queries / kDocuments == Approx(trigger.positions).epsilon(0.01));

  double chi_square = 0, degrees = 0, frequent = 0, nats = 0, bigrams = 0;
  for (auto& [byte, next] : drawn) {
    double total = 0;
    for (const auto& [token, count] : next) total += count;
    bigrams += total;
    for (size_t token = 0; token < 256; ++token) {
      const double p = static_cast<double>(table.pairs[byte][token]) / static_cast<double>(table.bytes[byte]);
      const double count = next[static_cast<uint8_t>(token)];
      if (p == 0) REQUIRE(count == 0);
      if (p == 0) continue;
      nats -= total * p * std::log(p);
      if (total * p < 5) continue;
      chi_square += (count - total * p) * (count - total * p) / (total * p);
      ++degrees;
    }
    --degrees;
    ++frequent;
  }
  INFO("chi-square " << chi_square << " with " << degrees << " degrees of freedom");
  CHECK(frequent > 15);
  CHECK(degrees > 60);
  CHECK(std::abs(chi_square - degrees) < 4 * std::sqrt(2 * degrees));
  CHECK(nats / bigrams == Approx(task.classes[1].entropy()).epsilon(0.01));
}

TEST_CASE("documents depend on task, seed and number only", "[synthetic]") {
  const std::vector<std::function<SyntheticTask(uint64_t)>> tasks = {
      [](uint64_t seed) { return backcopy(seed); },
      [](uint64_t seed) { return associative_recall({}, seed); },
      [](uint64_t seed) { return induction({}, seed); }};
  const std::vector<std::string> golden = {"fbea6b077e36f08d", "21c2d36683f3dac6", "b31d7c0ab8afd39f"};
  for (size_t t = 0; t < tasks.size(); ++t) {
    const SyntheticTask task = tasks[t](7);
    INFO(task.name);
    CHECK(hash_of(task) == hash_of(tasks[t](7)));
    CHECK(hash_of(task) != hash_of(tasks[t](8)));
    // Files that users have made are made again by later versions.
    CHECK(hash_of(task) == golden[t]);
    std::set<Document> different;
    for (uint64_t i = 0; i < 100; ++i) {
      different.insert(document_of(task, i));
      different.insert(document_of(task, kFirstValidationDocument + i));
    }
    CHECK(different.size() == 200);
  }
}

TEST_CASE("token files of a task are whole documents, whatever the number of threads", "[synthetic]") {
  TemporaryFolder folder;
  const SyntheticTask task = backcopy(1, 97);
  constexpr int64_t kDocuments = 1000;
  const int threads = num_threads();
  for (const int n : {1, 3}) {
    set_num_threads(n);
    write_documents(task, 5, kDocuments, folder / fmt::format("t{}", n));
  }
  set_num_threads(threads);
  for (const char* extension : {".bin", ".idx", ".json"})
    CHECK(io::read_file(folder / "t1" + extension) == io::read_file(folder / "t3" + extension));
  const TokenFile file(folder / "t1");
  REQUIRE(file.num_documents() == kDocuments);
  for (int64_t d = 0; d < kDocuments; ++d) {
    const Document document = document_of(task, 5 + static_cast<uint64_t>(d));
    REQUIRE(file.sequence_begin(d) == d * 97);
    for (int64_t i = 0; i < 97; ++i) REQUIRE(file.token(d * 97 + i) == document[static_cast<size_t>(i)]);
  }

  // Training reads them as bytes of the byte tokenizer.
  const auto info = read_token_file_info(folder / "t1");
  REQUIRE(info);
  CHECK(info->text_bytes == kDocuments * 97);
  Config config;
  config.model.vocab_size = 257;
  config.data.seq_len = 97;
  config.data.begin_token = 256;
  const Blend blend({{"bb", folder / "t1", 1}}, config);
  CHECK(blend.sources()[0].samples == kDocuments);
  CHECK(blend.sources()[0].unread == 0);
  CHECK_NOTHROW(check_tokens(blend, *make_tokenizer({}), config));
  const auto json = nlohmann::json::parse(io::read_file(folder / "t1.json"))["synthetic"];
  CHECK(json["task"] == "bigram-backcopy");
  CHECK(json["first_document"] == 5);
  CHECK(json["parameters"]["triggers"] == task.query_tokens);
  CHECK(json["positions"]["trigger"]["accuracy"] == 1.0);
  CHECK(json["queries"]["trigger"]["entropy"] == 0.0);
  CHECK(json["all"]["entropy"] == Approx(task.sum().nats / 97));
}

TEST_CASE("triggers are the most frequent bytes, characters or numbers", "[synthetic]") {
  const BigramTable table = table_of("aaabbcc\n\xff");
  CHECK(parse_triggers("auto:1", table) == Document{'a'});
  CHECK(parse_triggers("auto:2", table) == Document{'a', 'b'});  // b before c, which is as frequent
  CHECK(parse_triggers("auto:4", table) == Document{'\n', 'a', 'b', 'c'});
  CHECK(parse_triggers("chars:cb", table) == Document{'b', 'c'});
  CHECK(parse_triggers("bytes:255,10", table) == Document{'\n', 255});
  const std::string form = "must be auto:K, chars:TEXT or bytes:N,N,...";
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {"", form},
           {"3", form},
           {"auto", form},
           {"auto:", form},
           {"auto:two", form},
           {"auto:1,2", form},
           {"auto:0", "K must be from 1 to 4"},
           {"auto:5", "K must be from 1 to 4"},
           {"auto:99999999999999999999", form},
           {"chars:", form},
           {"chars:bb", "'b' is given twice"},
           {"chars:x", "'x' does not occur in the text"},
           {"chars:\xc3\xa4", "ASCII"},
           {"bytes:", form},
           {"bytes:97,", form},
           {"bytes:97;98", form},
           {"bytes:256", "256 is no byte"},
           {"bytes:-1", "-1 is no byte"},
           {"bytes:32", "the space does not occur"},
           {"bytes:10,97,98,99,255", "one at least must be no trigger"}}) {
    INFO(text);
    expect_error(ExitCode::usage, {"--triggers " + text, problem}, [&] { parse_triggers(text, table); });
  }
  expect_error(ExitCode::usage, {"one byte only"}, [] { parse_triggers("auto:1", table_of("aaa")); });
}

TEST_CASE("options of synthetic tasks out of bounds are refused by name", "[synthetic]") {
  const auto refused = [](const std::string& option, const std::function<void()>& make) {
    INFO(option);
    expect_error(ExitCode::usage, {option, "must be from"}, make);
  };
  refused("--seq-len 1:", [] { backcopy(1, 1); });
  refused("--seq-len 65537:", [] { backcopy(1, 65537); });
  refused("--keys 0:", [] { associative_recall({0, 1, 1, 1}, 1); });
  refused("--keys 256:", [] { associative_recall({256, 1, 1, 1}, 1); });
  refused("--values 193:", [] { associative_recall({64, 193, 1, 1}, 1); });
  refused("--pairs 65:", [] { associative_recall({64, 64, 65, 1}, 1); });
  refused("--queries 3:", [] { associative_recall({64, 64, 2, 3}, 1); });
  refused("--vocabulary 257:", [] { induction({257, 2, 4, 2}, 1); });
  refused("--longest-block 9:", [] { induction({8, 2, 9, 2}, 1); });
  refused("--shortest-block 1:", [] { induction({8, 1, 4, 2}, 1); });
  refused("--shortest-block 5:", [] { induction({8, 5, 4, 2}, 1); });
  refused("--repeats 1:", [] { induction({8, 2, 4, 1}, 1); });
  refused("--repeats 16385:", [] { induction({8, 2, 4, 16385}, 1); });
}

TEST_CASE("a byte that documents fall into is named", "[synthetic]") {
  // Behind b comes the trigger a nearly always, and behind that b again.
  const std::string text = "bababababababacdcdcdbdc";
  const BigramTable table = table_of(text);
  const SyntheticTask task = bigram_backcopy(table, {'a'}, 256, 1);
  REQUIRE(task.notes.size() == 1);
  CHECK_THAT(task.notes[0], Catch::Contains("'b' is the byte at") && Catch::Contains("are triggers"));
  CHECK(backcopy(1, 256).notes.empty());
}
