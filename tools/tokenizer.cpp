// sluice tokenizer: trains byte-level BPE tokenizers, and shows what one makes of a text.
#include "data/tokenizer.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/io.h"
#include "core/line_reader.h"
#include "core/strict_json.h"
#include "data/bpe_trainer.h"
#include "data/document_reader.h"
#include "data/pretokenizer.h"
#include "outputs.h"

namespace sluice {
namespace {

struct TrainOptions {
  std::vector<std::string> inputs, special_tokens;
  std::string output, key = "text", format = "auto";
  BpeTraining training;
  bool force = false;
};

struct ShowOptions {
  std::string tokenizer = "byte", input = "-", key;
  bool special = false;
};

void draw(const std::string& text) {
  if (!isatty(STDERR_FILENO)) return;
  fmt::print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
}

void train(const TrainOptions& options) {
  BpeTraining training = options.training;
  if (!options.special_tokens.empty()) training.special_tokens = options.special_tokens;
  refuse_inputs(options.output, options.inputs, "choose another name for the tokenizer");
  if (io::exists(options.output) && !options.force)
    fail(ExitCode::cannot_create, "{}: exists; --force replaces it", options.output);
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::max(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 1e-9);
  };
  BpeTrainer trainer(training);
  std::vector<std::string> documents;
  int64_t bytes = 0, pending = 0;
  const auto flush = [&] {
    trainer.count(documents);
    documents.clear();
    pending = 0;
    draw(fmt::format("{:.1f} MB read, {:.1f} MB/s", static_cast<double>(bytes) / 1e6,
                     static_cast<double>(bytes) / 1e6 / seconds()));
  };
  for (const std::string& input : options.inputs)
    read_documents(input, {options.format, options.key}, [&](std::string document) {
      bytes += std::ssize(document);
      pending += std::ssize(document);
      documents.push_back(std::move(document));
      if (pending >= int64_t{32} << 20) flush();
    });
  flush();
  const double counted = seconds();
  const BpeTrained trained = trainer.train([&](int64_t merges) { draw(fmt::format("{} merges", merges)); });
  draw("");
  io::NewFile file(options.output);
  file.write(trained.json.data(), trained.json.size());
  file.complete();
  file.publish();
  fmt::print("{}: {} tokens, {} merges, from {} pieces ({} different) of {:.1f} MB\n", options.output,
             trained.vocab_size, trained.merges, trained.pieces, trained.distinct_pieces,
             static_cast<double>(bytes) / 1e6);
  fmt::print("counted in {:.2f} s ({:.1f} MB/s), merged in {:.2f} s\n", counted,
             static_cast<double>(bytes) / 1e6 / counted, seconds() - counted);
  if (trained.vocab_size < training.vocab_size)
    fmt::print("fewer tokens than --vocab-size {}: no other pair is in the text {} times or more\n",
               training.vocab_size, training.min_frequency);
}

/// Every line of the input, as JSON.
void each_line(const ShowOptions& options,
               const std::function<void(const nlohmann::json&, const std::string&)>& use) {
  LineReader reader(options.input);
  for (std::string line; reader.next(line, size_t{64} << 20); line.clear()) {
    const std::string where = fmt::format("{}:{}", reader.path(), reader.line_number());
    if (reader.within_line()) fail(ExitCode::data, "{}: the line has more than 64 MiB", where);
    while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
    if (!line.empty()) use(parse_strict_json(line, where), where);
  }
}

void encode(const ShowOptions& options) {
  const auto tokenizer = make_tokenizer(tokenizer_config(options.tokenizer));
  each_line(options, [&](const nlohmann::json& line, const std::string& where) {
    const auto found = line.is_object() ? line.find(options.key.empty() ? "text" : options.key) : line.end();
    const nlohmann::json& text = line.is_object() && found != line.end() ? *found : line;
    if (!text.is_string())
      fail(ExitCode::data, "{}: must be a text, or an object with one under --key", where);
    const std::string& value = text.get_ref<const std::string&>();
    const auto ids = options.special ? tokenizer->encode_with_special(value) : tokenizer->encode(value);
    fmt::print("{}\n", nlohmann::json(ids).dump());
  });
}

void decode(const ShowOptions& options) {
  const auto tokenizer = make_tokenizer(tokenizer_config(options.tokenizer));
  each_line(options, [&](const nlohmann::json& line, const std::string& where) {
    if (!line.is_array()) fail(ExitCode::data, "{}: must be a list of token ids", where);
    std::vector<int32_t> ids;
    for (const nlohmann::json& id : line) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(tokenizer->vocab_size()))
        fail(ExitCode::data, "{}: token ids are whole numbers from 0 to {}, got {}", where,
             tokenizer->vocab_size() - 1, printable(id.dump()));
      ids.push_back(id.get<int32_t>());
    }
    const nlohmann::json text = tokenizer->decode(ids);
    fmt::print("{}\n", text.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  });
}

void add_show(Command& command, const std::shared_ptr<ShowOptions>& options) {
  command.add_option("input", options->input, "JSON, one value per line; - is standard input (default)")
      ->type_name("INPUT");
  command
      .add_option("--tokenizer", options->tokenizer,
                  "byte, a SentencePiece .model file or a tokenizer.json (default: byte)")
      ->type_name("byte|PATH");
}

}  // namespace

void add_tokenizer_command(Command& app, int&) {
  Command* command = app.add_subcommand("tokenizer", "train a tokenizer, look at one");
  command->require_subcommand(1);

  auto options = std::make_shared<TrainOptions>();
  Command* sub = command->add_subcommand("train", "train byte-level BPE; writes a tokenizer.json");
  sub->add_option("input", options->inputs, "text or JSONL files, optionally gzipped; - is standard input")
      ->required()
      ->type_name("INPUT");
  sub->add_option("-o,--output", options->output, "the tokenizer.json")->required()->type_name("FILE");
  sub->add_option("--vocab-size", options->training.vocab_size,
                  "tokens, the 256 bytes and the special tokens included")
      ->required()
      ->type_name("N");
  sub->add_option("--pretokenizer", options->training.pretokenizer,
                  "how text is cut before merging: gpt2, llama3 (default), qwen2 or o200k")
      ->one_of(known_pattern_names())
      ->type_name("NAME");
  sub->add_option(
         "--special-token", options->special_tokens,
         "a token that stands for no text, may be repeated; the first id is 0 (default: <|endoftext|>)")
      ->allow_extra_args(false)
      ->type_name("TOKEN");
  sub->add_option("--min-frequency", options->training.min_frequency,
                  "a pair is merged only if it occurs so often (default: 2)")
      ->type_name("N");
  sub->add_flag("--nfc", options->training.nfc, "bring text to Unicode form NFC first, as Qwen does");
  sub->add_option("--format", options->format, "auto (by the name; standard input is text), text or jsonl")
      ->one_of({"auto", "text", "jsonl"})
      ->type_name("FORMAT");
  sub->add_option("--key", options->key, "JSONL: the key of the text (default: text)")->type_name("NAME");
  sub->add_flag("--force", options->force, "replace an existing file");
  sub->footer(
      "The same text gives the same file, with any number of threads. Hugging Face's tokenizers and "
      "transformers\n"
      "load it. Documents as for `sluice tokenize`.\n\n"
      "Examples:\n"
      "  sluice tokenizer train book.txt -o book.json --vocab-size 8192\n"
      "  sluice tokenizer train web-*.jsonl.gz -o web.json --vocab-size 32768 --pretokenizer qwen2 --nfc\n"
      "  sluice tokenize book.txt -o data/book --tokenizer book.json\n");
  sub->callback([options] { train(*options); });

  auto show = std::make_shared<ShowOptions>();
  sub = command->add_subcommand("encode", "texts (JSON, one per line) to lists of token ids");
  add_show(*sub, show);
  sub->add_option("--key", show->key, "key of the text where lines are objects (default: text)")
      ->type_name("NAME");
  sub->add_flag("--special", show->special, "special tokens that are written out become those tokens");
  sub->footer(
      "Example:\n  echo '\"In the beginning\"' | sluice tokenizer encode --tokenizer tokenizer.json\n");
  sub->callback([show] { encode(*show); });

  sub = command->add_subcommand("decode", "lists of token ids (JSON, one per line) to texts");
  add_show(*sub, show);
  sub->footer("Example:\n  echo '[1, 2, 3]' | sluice tokenizer decode --tokenizer tokenizer.json\n");
  sub->callback([show] { decode(*show); });
}

}  // namespace sluice
