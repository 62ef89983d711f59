// sluice synthesize: token files of synthetic tasks.
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <filesystem>
#include <memory>

#include "commands.h"
#include "core/io.h"
#include "data/synthetic.h"
#include "outputs.h"

namespace sluice {

namespace {

struct Options {
  std::string output, validation_output, text, triggers = "auto:3";
  int64_t documents = 0, validation_documents = 0, seq_len = 256;
  uint64_t seed = 0;
  RecallOptions recall;
  InductionOptions induction;
  bool force = false;
};

void check(const Options& o) {
  if (o.validation_output.empty() != (o.validation_documents == 0))
    fail(ExitCode::usage, "--validation-prefix and --validation-documents go together");
  std::vector<std::string> inputs;
  if (!o.text.empty()) inputs.push_back(o.text);
  check_token_outputs({o.output, o.validation_output}, inputs, o.force);
}

SyntheticTask backcopy_task(const Options& o) {
  const io::MappedFile text(o.text);
  if (text.size() >= 2 && text.data()[0] == 0x1f && text.data()[1] == 0x8b)
    fail(ExitCode::data, "{}: is compressed by gzip; unpack it first (gunzip)", o.text);
  if (text.size() < 2) fail(ExitCode::data, "{}: {} bytes are no text", o.text, text.size());
  const BigramTable table = count_bigrams(text.data(), text.size());
  SyntheticTask task = bigram_backcopy(table, parse_triggers(o.triggers, table), o.seq_len, o.seed);
  task.parameters["text"] = std::filesystem::path(o.text).filename().string();
  task.parameters["text_bytes"] = text.size();
  return task;
}

void print_classes(const SyntheticTask& task) {
  const auto line = [&](const std::string& name, const PositionClass& c) {
    fmt::print("{:<20}{:>10.2f}%{:>20.4f}{:>18.2f}%\n", name,
               100 * c.positions / static_cast<double>(task.length), c.entropy(), 100 * c.accuracy());
  };
  fmt::print("\n{:<20}{:>11}{:>20}{:>19}\n", "positions", "share", "best loss (nats)", "best accuracy");
  for (const PositionClass& c : task.classes) line(c.name, c);
  line("all", task.sum());
  if (task.query_class.empty()) return;
  line("queries: " + task.query_class, task.sum(task.query_class));
  line("queries: other", task.sum("other"));
}

void print_configuration(const SyntheticTask& task, const Options& o) {
  const auto source = [&](const std::string& prefix) {
    return fmt::format("[{{name: {}, path: {}}}]", task.name, std::filesystem::absolute(prefix).string());
  };
  fmt::print("\nFor a configuration:\n\ndata:\n  seq_len: {}\n  begin_token: 256\n  train: {}\n", task.length,
             source(o.output));
  if (!o.validation_output.empty()) fmt::print("  validation: {}\n", source(o.validation_output));
  if (!task.query_class.empty())
    fmt::print("analysis:\n  query_classes: [{{name: {}, tokens: [{}]}}]\n", task.query_class,
               fmt::join(task.query_tokens, ", "));
}

void synthesize(const Options& o, const std::function<SyntheticTask(const Options&)>& make_task) {
  const SyntheticTask task = make_task(o);
  check(o);
  const auto write = [&](uint64_t first, int64_t count, const std::string& prefix) {
    write_documents(task, first, count, prefix);
    fmt::print("{}: {} documents of {} tokens\n", prefix, count, task.length);
  };
  write(0, o.documents, o.output);
  if (!o.validation_output.empty())
    write(kFirstValidationDocument, o.validation_documents, o.validation_output);
  for (const std::string& note : task.notes) spdlog::warn("{}", note);
  print_classes(task);
  print_configuration(task, o);
}

constexpr double kMostDocuments = 1e9;

/// A task's command with the options that all tasks have. Its own come first in the help.
template <class MakeTask, class AddOptions>
void add_task(Command& parent, const char* name, const char* help, const AddOptions& add_options,
              const MakeTask& make_task) {
  auto options = std::make_shared<Options>();
  Command* command = parent.add_subcommand(name, help);
  add_options(*command, *options);
  command->add_option("-o,--output", options->output, "writes PREFIX.bin, PREFIX.idx and PREFIX.json")
      ->required()
      ->type_name("PREFIX");
  command->add_option("--documents", options->documents, "number of documents")
      ->required()
      ->between(1, kMostDocuments)
      ->type_name("N");
  command
      ->add_option("--validation-prefix", options->validation_output,
                   "prefix of the token files for held-out documents")
      ->type_name("PREFIX");
  command->add_option("--validation-documents", options->validation_documents, "number of held-out documents")
      ->between(1, kMostDocuments)
      ->type_name("N");
  command->add_option("--seed", options->seed, "the same seed gives the same documents (0)");
  command->add_flag("--force", options->force, "replace existing token files");
  command->callback([options, make_task] { synthesize(*options, make_task); });
}

}  // namespace

void add_synthesize_command(Command& app, int&) {
  Command* command =
      app.add_subcommand("synthesize", "token files of synthetic tasks, and the best loss that is possible");
  command->require_subcommand(1);
  add_task(
      *command, "bigram-backcopy",
      "bytes drawn from a text's bigrams; behind a trigger the byte before it comes again",
      [](Command& task, Options& o) {
        task.add_option("--text", o.text, "the text whose bigrams are counted, byte by byte")
            ->required()
            ->type_name("FILE");
        task.add_option("--seq-len", o.seq_len, "bytes of a document (256)")->type_name("T");
        task.add_option("--triggers", o.triggers,
                        "auto:K, the K most frequent bytes (auto:3); chars:TEXT, these characters; or "
                        "bytes:N,N,...")
            ->type_name("BYTES");
      },
      backcopy_task);
  add_task(
      *command, "associative-recall",
      "pairs of keys and values, then keys again, behind which their values come",
      [](Command& task, Options& o) {
        task.add_option("--keys", o.recall.keys, "number of keys in the vocabulary (64)");
        task.add_option("--values", o.recall.values, "number of values in the vocabulary (64)");
        task.add_option("--pairs", o.recall.pairs, "pairs in a document (32)");
        task.add_option("--queries", o.recall.queries, "pairs that are asked for (32)");
      },
      [](const Options& o) { return associative_recall(o.recall, o.seed); });
  add_task(
      *command, "induction", "a block of random tokens, repeated",
      [](Command& task, Options& o) {
        task.add_option("--vocabulary", o.induction.vocabulary, "number of tokens (128)");
        task.add_option("--shortest-block", o.induction.shortest_block, "tokens of the shortest block (16)");
        task.add_option("--longest-block", o.induction.longest_block, "tokens of the longest block (64)");
        task.add_option("--repeats", o.induction.repeats,
                        "documents are as long as this many of the longest blocks (4)");
      },
      [](const Options& o) { return induction(o.induction, o.seed); });
  command->footer(
      "Examples:\n"
      "  sluice synthesize bigram-backcopy --text data/text/train.txt --triggers auto:3 --seq-len 256 \\\n"
      "    --documents 40000 -o data/bb --validation-documents 200 --validation-prefix data/bb_held\n"
      "  sluice synthesize associative-recall --pairs 16 --queries 16 --documents 20000 -o data/recall\n"
      "  sluice synthesize induction --documents 20000 -o data/induction\n");
}

}  // namespace sluice
