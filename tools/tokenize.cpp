// sluice tokenize: text to token files.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "commands.h"
#include "core/io.h"
#include "core/line_reader.h"
#include "core/parallel_for.h"
#include "data/text_loss.h"
#include "data/token_check.h"
#include "data/token_file.h"
#include "data/tokenizer.h"

namespace sluice {

namespace {

struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::string output, tokenizer = "byte", key = "text", validation_output;
  std::string format = "auto";
  int64_t validation_every = 0, max_document_mb = 0;
  bool force = false;
};

constexpr std::string_view kSeparator = "<|endoftext|>";

// Size of the parts in which text is encoded (if the tokenizer allows parts) and in which lines are read.
constexpr size_t kPart = size_t{1} << 20;

/// A document in process: its raw line, then its text, then its tokens.
struct Document {
  std::string text;   // kept if the document is encoded in parts while it is written
  std::string where;  // file:line, for JSONL
  int64_t text_bytes = 0, lost_bytes = 0;
  std::vector<int32_t> tokens;
  std::exception_ptr error;
};

class Run {
 public:
  Run(const TokenizeOptions& options, const Tokenizer& tokenizer, const std::string& name)
      : options_(options),
        tokenizer_(tokenizer),
        tokenizer_name_(name),
        train_(options.output, tokenizer.vocab_size()) {
    if (options.validation_every > 0) validation_.emplace(options.validation_output, tokenizer.vocab_size());
  }

  void read(const std::string& input) {
    LineReader reader(input);
    if (is_jsonl(input)) {
      read_lines(reader);
    } else {
      read_text(reader);
    }
  }

  void finish() {
    flush();
    const double seconds = elapsed();
    if (train_.info.documents == 0) {
      fail(ExitCode::data, "the input contains no document{}", validation_ ? " for training" : "");
    }
    if (validation_ && validation_->info.documents == 0) {
      fail(ExitCode::data, "{} documents are too few to hold out one in {}", train_.info.documents,
           options_.validation_every);
    }
    train_.finish(tokenizer_, tokenizer_name_);
    if (validation_) validation_->finish(tokenizer_, tokenizer_name_);
    progress(true);
    for (const Output* output : {&train_, validation_ ? &*validation_ : nullptr}) {
      if (!output) continue;
      const TokenFileInfo& info = output->info;
      fmt::print("{}: {} documents, {} tokens, {:.3f} bytes/token, largest id {} of {}\n", output->prefix,
                 info.documents, info.tokens,
                 static_cast<double>(info.text_bytes) / static_cast<double>(info.tokens), info.largest_token,
                 info.vocab_size);
      warn_of_loss(*output);
    }
    fmt::print("{:.1f} MB of text in {:.2f} s: {:.1f} MB/s\n", megabytes(), seconds,
               megabytes() / std::max(seconds, 1e-9));
  }

 private:
  struct Output {
    Output(const std::string& prefix_, int64_t vocab_size) : prefix(prefix_), writer(prefix_, vocab_size) {}
    void add_part(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
      writer.add_part(tokens.data(), std::ssize(tokens));
      info.tokens += std::ssize(tokens);
      for (const int32_t token : tokens) {
        info.largest_token = std::max<int64_t>(info.largest_token, token);
        info.token_bytes += tokenizer.token_bytes(token);
      }
    }
    void finish(const Tokenizer& tokenizer, const std::string& tokenizer_name) {
      info.tokenizer = tokenizer.fingerprint();
      info.tokenizer_name = tokenizer_name;
      info.vocab_size = tokenizer.vocab_size();
      info.end_of_document = tokenizer.end_of_document();
      writer.finish();
      write_token_file_info(prefix, info);
    }
    std::string prefix;
    TokenFileWriter writer;
    TokenFileInfo info;
  };

  void read_lines(LineReader& reader) {
    for (std::string line; reader.next(line, most_bytes() + 1); line = {}) {
      const std::string where = fmt::format("{}:{}", reader.path(), reader.line_number());
      if (line.size() > most_bytes()) refuse_size(where, "line", "");
      if (line.find_first_not_of(" \t\r\n") == std::string::npos) continue;
      add({std::move(line), where, 0, 0, {}, {}});
    }
  }

  /// If the tokenizer can encode in parts, a long document is written while it is read.
  void read_text(LineReader& reader) {
    std::string line, text;
    int64_t begin = 1;
    Output* open = nullptr;
    const auto end = [&] {
      if (open) {
        write_part(*open, text);
        end_document(*open);
      } else if (!text.empty()) {
        add({std::move(text), {}, 0, 0, {}, {}});
      }
      text = {};
      open = nullptr;
    };
    for (bool continued = false; reader.next(line, kPart); continued = reader.within_line()) {
      if (!continued && is_separator(line)) {
        end();
        begin = reader.line_number() + 1;
        continue;
      }
      text += line;
      if (tokenizer_.encodes_in_parts() && text.size() >= kPart) {
        if (!open) {
          flush();
          open = &next_output();
        }
        write_part(*open, text);
        text.clear();
      } else if (text.size() > most_bytes()) {
        refuse_size(fmt::format("{}:{}", reader.path(), begin), "document that begins here",
                    "; lines with <|endoftext|> separate the documents of a text file");
      }
    }
    end();
  }

  /// Limit for documents that are held in memory as a whole. SentencePiece's encoders need up to 200 bytes
  /// per byte of text.
  int64_t most_mb() const {
    if (options_.max_document_mb > 0) return options_.max_document_mb;
    return tokenizer_.encodes_in_parts() ? 64 : 8;
  }
  size_t most_bytes() const { return static_cast<size_t>(most_mb()) << 20; }

  [[noreturn]] void refuse_size(const std::string& where, const char* what, const char* remedy) const {
    fail(ExitCode::data,
         "{}: the {} has more than {} MiB and would be held in memory as a whole{}; --max-document-mb raises "
         "the "
         "limit",
         where, what, most_mb(), remedy);
  }

  bool is_jsonl(std::string name) const {
    if (name.ends_with(".zst")) {
      fail(ExitCode::usage, "{}: zstd is not supported; use zstd -dc {} | sluice tokenize - ...", name, name);
    }
    if (options_.format != "auto") return options_.format == "jsonl";
    if (name.ends_with(".gz")) name.resize(name.size() - 3);
    for (const char* ending : {".jsonl", ".ndjson", ".json"}) {
      if (name.ends_with(ending)) return true;
    }
    return false;
  }

  static bool is_separator(std::string_view line) {
    while (line.ends_with('\n') || line.ends_with('\r')) line.remove_suffix(1);
    return line == kSeparator;
  }

  void add(Document document) {
    pending_bytes_ += std::ssize(document.text);
    pending_.push_back(std::move(document));
    if (pending_bytes_ >= int64_t{8} << 20) flush();
  }

  void encode(Document& document) const {
    if (!document.where.empty()) document.text = text_of(document);
    if (document.text.empty() || (tokenizer_.encodes_in_parts() && document.text.size() > kPart)) return;
    document.text_bytes = std::ssize(document.text);
    document.tokens = tokenizer_.encode(document.text);
    document.lost_bytes = tokenizer_.lost_bytes(document.text, document.tokens);
    document.tokens.push_back(tokenizer_.end_of_document());
    document.text = {};
  }

  std::string text_of(const Document& document) const {
    auto object = nlohmann::json::parse(document.text, nullptr, false);
    if (!object.is_object()) fail(ExitCode::data, "{}: not a JSON object in UTF-8", document.where);
    const auto found = object.find(options_.key);
    if (found == object.end() || !found->is_string()) {
      fail(ExitCode::data, "{}: has no text under the key \"{}\" (--key selects another)", document.where,
           options_.key);
    }
    return std::move(found->get_ref<std::string&>());
  }

  /// Encodes the pending documents on all threads and writes them in order.
  void flush() {
    parallel_for(static_cast<int64_t>(pending_.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Document& document = pending_[static_cast<size_t>(i)];
        try {
          encode(document);
        } catch (...) {  // exceptions must not leave a thread; rethrown below, in the order of the documents
          document.error = std::current_exception();
        }
      }
    });
    for (Document& document : pending_) {
      if (document.error) std::rethrow_exception(document.error);
      if (document.tokens.empty() && document.text.empty()) continue;
      Output& output = next_output();
      if (document.tokens.empty()) {
        for (size_t at = 0; at < document.text.size(); at += kPart)
          write_part(output, document.text.substr(at, kPart));
        end_document(output);
      } else {
        output.add_part(tokenizer_, document.tokens);
        output.writer.end_document();
        output.info.text_bytes += document.text_bytes;
        output.info.lost_bytes += document.lost_bytes;
      }
    }
    pending_.clear();
    pending_bytes_ = 0;
    progress(false);
  }

  /// The writer of the next document.
  Output& next_output() {
    ++documents_;
    Output& output = validation_ && documents_ % options_.validation_every == 0 ? *validation_ : train_;
    ++output.info.documents;
    return output;
  }

  void write_part(Output& output, const std::string& text) {
    output.add_part(tokenizer_, tokenizer_.encode(text));
    output.info.text_bytes += std::ssize(text);
    progress(false);
  }

  void end_document(Output& output) {
    output.add_part(tokenizer_, {tokenizer_.end_of_document()});
    output.writer.end_document();
  }

  void warn_of_loss(const Output& output) const {
    TextLoss loss;
    loss.add(output.info);
    if (loss.lost_bytes == 0) return;
    spdlog::warn(
        "{}: {} ({} of {}): {} has {}. No model trained on these tokens can reproduce them; bits per byte "
        "count all bytes that were read. Line breaks, indentation and every character are kept by a "
        "SentencePiece model "
        "trained with "
        "--normalization_rule_name=identity --remove_extra_whitespaces=false --byte_fallback=true.",
        output.prefix, loss.describe(), loss.lost_bytes, loss.text_bytes, tokenizer_.name(),
        tokenizer_.normalization());
  }

  void progress(bool last) const {
    if (!isatty(STDERR_FILENO)) return;
    const int64_t tokens = train_.info.tokens + (validation_ ? validation_->info.tokens : 0);
    fmt::print(stderr, "\r\033[K");
    if (!last)
      fmt::print(stderr, "{} documents, {} tokens, {:.1f} MB/s", documents_, tokens, megabytes() / elapsed());
    std::fflush(stderr);
  }

  double elapsed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  double megabytes() const {
    return static_cast<double>(train_.info.text_bytes + (validation_ ? validation_->info.text_bytes : 0)) /
           1e6;
  }

  const TokenizeOptions& options_;
  const Tokenizer& tokenizer_;
  const std::string tokenizer_name_;
  Output train_;
  std::optional<Output> validation_;
  std::vector<Document> pending_;
  int64_t pending_bytes_ = 0, documents_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Existing token files are replaced only with --force: a second call with other options would put other
/// documents, or held-out documents, into the training data.
void check_outputs(const TokenizeOptions& options) {
  const auto normal = [](const std::string& prefix) { return std::filesystem::weakly_canonical(prefix); };
  if (!options.validation_output.empty() && normal(options.output) == normal(options.validation_output))
    fail(ExitCode::usage, "-o and --validation-prefix are both {}: held-out documents need separate files",
         options.output);
  if (options.force) return;
  for (const std::string& prefix : {options.output, options.validation_output})
    for (const char* extension : {".bin", ".idx", ".json"})
      if (!prefix.empty() && io::exists(prefix + extension))
        fail(ExitCode::cannot_create,
             "{}{}: exists; choose another prefix, or --force to replace the token files {}", prefix,
             extension, prefix);
}

void tokenize(const TokenizeOptions& options) {
  if (options.validation_output.empty() != (options.validation_every == 0) || options.validation_every == 1 ||
      options.validation_every < 0) {
    fail(ExitCode::usage, "--validation-prefix and --validation-every (2 or more) go together");
  }
  if (options.format != "auto" && options.format != "text" && options.format != "jsonl") {
    fail(ExitCode::usage, "--format {}: must be auto, text or jsonl", options.format);
  }
  const TokenizerConfig config = tokenizer_config(options.tokenizer);
  const auto tokenizer = make_tokenizer(config);
  check_outputs(options);
  Run run(options, *tokenizer, tokenizer_name(config));
  for (const std::string& input : options.inputs) run.read(input);
  run.finish();
}

}  // namespace

void add_tokenize_command(Command& app, int&) {
  Command* command = app.add_subcommand("tokenize", "text to token files (Megatron .bin/.idx)");
  auto options = std::make_shared<TokenizeOptions>();
  command
      ->add_option("input", options->inputs, "text or JSONL files, optionally gzipped; - is standard input")
      ->required()
      ->type_name("INPUT");
  command->add_option("-o,--output", options->output, "writes PREFIX.bin, PREFIX.idx and PREFIX.json")
      ->required()
      ->type_name("PREFIX");
  command
      ->add_option("--tokenizer", options->tokenizer, "byte, or a SentencePiece .model file (default: byte)")
      ->type_name("byte|PATH");
  command
      ->add_option("--format", options->format, "auto (by the name; standard input is text), text or jsonl")
      ->type_name("FORMAT");
  command->add_option("--key", options->key, "JSONL: the key of the text (default: text)")->type_name("NAME");
  command
      ->add_option("--validation-prefix", options->validation_output,
                   "prefix of the token files for every Nth document, which is held out")
      ->type_name("PREFIX");
  command->add_option("--validation-every", options->validation_every, "N (2 or more)")->type_name("N");
  command->add_flag("--force", options->force, "replace existing token files");
  command
      ->add_option(
          "--max-document-mb", options->max_document_mb,
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
