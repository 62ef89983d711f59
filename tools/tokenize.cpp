// sluice tokenize: text to token files.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "data/text_loss.h"
#include "data/text_tokenizer.h"
#include "data/token_check.h"
#include "outputs.h"

namespace sluice {

namespace {

struct Options {
  TokenizeOptions text;
  std::vector<std::string> inputs;
  std::string tokenizer = "byte", end_of_document;
  bool force = false;
};

void draw_progress(const TokenizeProgress& progress, bool last) {
  if (!isatty(STDERR_FILENO)) return;
  fmt::print(stderr, "\r\033[K");
  if (!last)
    fmt::print(stderr, "{} documents, {} tokens, {:.1f} MB/s", progress.documents, progress.tokens,
               progress.megabytes / progress.seconds);
  std::fflush(stderr);
}

void warn_of_loss(const TokenizedFile& file, const Tokenizer& tokenizer) {
  TextLoss loss;
  loss.add(file.info);
  if (loss.lost_bytes == 0) return;
  spdlog::warn(
      "{}: {} ({} of {}): {} has {}. No model trained on these tokens can reproduce them; bits per byte "
      "count all bytes that were read. Every byte is kept by byte-level BPE without a normaliser (sluice "
      "tokenizer train); line breaks, indentation and every character but U+2581 by a SentencePiece model "
      "trained with --normalization_rule_name=identity --remove_extra_whitespaces=false "
      "--byte_fallback=true.",
      file.prefix, loss.describe(), loss.lost_bytes, loss.text_bytes, tokenizer.name(),
      tokenizer.normalization());
}

void tokenize(const Options& all) {
  const TokenizeOptions& options = all.text;
  if (options.validation_output.empty() != (options.validation_every == 0) || options.validation_every == 1 ||
      options.validation_every < 0) {
    fail(ExitCode::usage, "--validation-prefix and --validation-every (2 or more) go together");
  }
  if (options.format != "auto" && options.format != "text" && options.format != "jsonl") {
    fail(ExitCode::usage, "--format {}: must be auto, text or jsonl", options.format);
  }
  TokenizerConfig config = tokenizer_config(all.tokenizer);
  config.end_of_document = all.end_of_document;
  if (!config.end_of_document.empty() && config.type != TokenizerType::bpe)
    fail(ExitCode::usage,
         "--end-of-document {}: only a tokenizer.json lets the token be chosen; documents of {} end with its "
         "own",
         all.end_of_document, all.tokenizer);
  std::vector<std::string> inputs = all.inputs;
  if (!config.path.empty()) inputs.push_back(config.path);
  check_token_outputs({options.output, options.validation_output}, inputs, all.force);
  const auto tokenizer = make_tokenizer(config);
  TextTokenizer text(options, *tokenizer, tokenizer_name(config),
                     [](const TokenizeProgress& progress) { draw_progress(progress, false); });
  for (const std::string& input : all.inputs) text.read(input);
  const std::vector<TokenizedFile> files = text.finish();
  const TokenizeProgress done = text.progress();
  draw_progress(done, true);
  for (const TokenizedFile& file : files) {
    const TokenFileInfo& info = file.info;
    fmt::print("{}: {} documents, {} tokens, {:.3f} bytes/token, largest id {} of {}\n", file.prefix,
               info.documents, info.tokens,
               static_cast<double>(info.text_bytes) / static_cast<double>(info.tokens), info.largest_token,
               info.vocab_size);
    warn_of_loss(file, *tokenizer);
  }
  if (done.skipped > 0)
    spdlog::warn("{} bad document{} left out; the first: {}", done.skipped, done.skipped == 1 ? "" : "s",
                 done.first_problem);
  fmt::print("{:.1f} MB of text in {:.2f} s: {:.1f} MB/s\n", done.megabytes, done.seconds,
             done.megabytes / std::max(done.seconds, 1e-9));
}

}  // namespace

void add_tokenize_command(Command& app, int&) {
  Command* command = app.add_subcommand("tokenize", "text to token files (Megatron .bin/.idx)");
  auto options = std::make_shared<Options>();
  command
      ->add_option("input", options->inputs, "text or JSONL files, optionally gzipped; - is standard input")
      ->required()
      ->type_name("INPUT");
  command->add_option("-o,--output", options->text.output, "writes PREFIX.bin, PREFIX.idx and PREFIX.json")
      ->required()
      ->type_name("PREFIX");
  command
      ->add_option("--tokenizer", options->tokenizer,
                   "byte, a SentencePiece .model file or a tokenizer.json (default: byte)")
      ->type_name("byte|PATH");
  command
      ->add_option(
          "--end-of-document", options->end_of_document,
          "tokenizer.json: the token behind each document, as data.tokenizer.end_of_document names it to a "
          "run (default: <|endoftext|>, <|end_of_text|>, </s> or <eos>, the first that the file has)")
      ->type_name("TOKEN");
  command
      ->add_option("--format", options->text.format,
                   "auto (by the name; standard input is text), text or jsonl")
      ->type_name("FORMAT");
  command->add_option("--key", options->text.key, "JSONL: the key of the text (default: text)")
      ->type_name("NAME");
  command
      ->add_option("--validation-prefix", options->text.validation_output,
                   "prefix of the token files for every Nth document, which is held out")
      ->type_name("PREFIX");
  command->add_option("--validation-every", options->text.validation_every, "N (2 or more)")->type_name("N");
  command->add_flag("--skip-bad-documents", options->text.skip_bad_documents,
                    "leave out lines of JSONL that are no JSON, or have no text, and say how many");
  command->add_flag("--force", options->force, "replace existing token files");
  command
      ->add_option(
          "--max-document-mb", options->text.max_document_mb,
          "largest document in MiB that is held in memory as a whole: a line of JSONL (64), or any document "
          "with a SentencePiece model, whose encoder needs up to 200 times as much memory (8)")
      ->between(1, 1e6)
      ->type_name("MIB");
  command->footer(
      "A text file is one document, or several separated by lines with <|endoftext|>. An end-of-document "
      "token\n"
      "follows each. Empty documents are skipped.\n\n"
      "Examples:\n"
      "  sluice tokenize book.txt -o data/book\n"
      "  sluice tokenize web-*.jsonl.gz -o data/web --tokenizer english.model\n"
      "  zstd -dc web.jsonl.zst | sluice tokenize - --format jsonl -o data/web --validation-prefix data/held "
      "--validation-every 100\n");
  command->callback([options] { tokenize(*options); });
}

}  // namespace sluice
