#include "data/text_tokenizer.h"

#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/line_reader.h"
#include "core/parallel_for.h"
#include "core/strict_json.h"
#include "data/document_reader.h"
#include "data/token_file.h"

namespace sluice {

namespace {

constexpr std::string_view kSkipHint = " (--skip-bad-documents leaves such lines out)";

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

}  // namespace

class TextTokenizer::Impl {
 public:
  Impl(TokenizeOptions options, const Tokenizer& tokenizer, const std::string& name,
       std::function<void(const TokenizeProgress&)> progress)
      : options_(std::move(options)),
        tokenizer_(tokenizer),
        tokenizer_name_(name),
        report_(std::move(progress)),
        train_(options_.output, tokenizer.vocab_size()) {
    if (options_.validation_every > 0)
      validation_.emplace(options_.validation_output, tokenizer.vocab_size());
  }

  void read(const std::string& input) {
    LineReader reader(input);
    if (is_jsonl_file(input, options_.format)) {
      read_lines(reader);
    } else {
      read_text(reader);
    }
  }

  std::vector<TokenizedFile> finish() {
    flush();
    if (train_.file.info.documents == 0) {
      fail(ExitCode::data, "the input contains no document{}", validation_ ? " for training" : "");
    }
    if (validation_ && validation_->file.info.documents == 0) {
      fail(ExitCode::data, "{} documents are too few to hold out one in {}", train_.file.info.documents,
           options_.validation_every);
    }
    std::vector<TokenizedFile> files;
    for (Output* output : {&train_, validation_ ? &*validation_ : nullptr}) {
      if (!output) continue;
      output->finish(tokenizer_, tokenizer_name_);
      files.push_back(output->file);
    }
    return files;
  }

  TokenizeProgress progress() const {
    const TokenFileInfo none, &held = validation_ ? validation_->file.info : none;
    return {documents_,
            train_.file.info.tokens + held.tokens,
            static_cast<double>(train_.file.info.text_bytes + held.text_bytes) / 1e6,
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(),
            skipped_,
            first_problem_};
  }

 private:
  struct Output {
    Output(const std::string& prefix, int64_t vocab_size) : file{prefix, {}}, writer(prefix, vocab_size) {}
    void add_part(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens) {
      writer.add_part(tokens.data(), std::ssize(tokens));
      file.info.tokens += std::ssize(tokens);
      for (const int32_t token : tokens) {
        file.info.largest_token = std::max<int64_t>(file.info.largest_token, token);
        file.info.token_bytes += tokenizer.token_bytes(token);
      }
    }
    void finish(const Tokenizer& tokenizer, const std::string& tokenizer_name) {
      file.info.tokenizer = tokenizer.fingerprint();
      file.info.tokenizer_name = tokenizer_name;
      file.info.vocab_size = tokenizer.vocab_size();
      file.info.end_of_document = tokenizer.end_of_document();
      writer.finish();
      write_token_file_info(file.prefix, file.info);
    }
    TokenizedFile file;
    TokenFileWriter writer;
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
      if (!continued && is_document_separator(line)) {
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

  /// Limit for documents that are held in memory as a whole.
  int64_t most_mb() const {
    return options_.max_document_mb > 0 ? options_.max_document_mb : tokenizer_.document_mb();
  }
  size_t most_bytes() const { return static_cast<size_t>(most_mb()) << 20; }

  [[noreturn]] void refuse_size(const std::string& where, const char* what, const char* remedy) const {
    fail(ExitCode::data,
         "{}: the {} has more than {} MiB and would be held in memory as a whole{}; --max-document-mb raises "
         "the "
         "limit",
         where, what, most_mb(), remedy);
  }

  void add(Document document) {
    pending_bytes_ += std::ssize(document.text);
    pending_.push_back(std::move(document));
    if (pending_bytes_ >= int64_t{8} << 20) flush();
  }

  void encode(Document& document) const {
    if (!document.where.empty())
      document.text = text_of_json_line(document.text, options_.key, document.where, kSkipHint);
    if (document.text.empty() || (tokenizer_.encodes_in_parts() && document.text.size() > kPart)) return;
    document.text_bytes = std::ssize(document.text);
    document.tokens = tokenizer_.encode(document.text);
    document.lost_bytes = tokenizer_.lost_bytes(document.text, document.tokens);
    document.tokens.push_back(tokenizer_.end_of_document());
    document.text = {};
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
      if (document.error && skip(document)) continue;
      if (document.tokens.empty() && document.text.empty()) continue;
      Output& output = next_output();
      if (document.tokens.empty()) {
        for (size_t at = 0; at < document.text.size(); at += kPart)
          write_part(output, document.text.substr(at, kPart));
        end_document(output);
      } else {
        output.add_part(tokenizer_, document.tokens);
        output.writer.end_document();
        output.file.info.text_bytes += document.text_bytes;
        output.file.info.lost_bytes += document.lost_bytes;
      }
    }
    pending_.clear();
    pending_bytes_ = 0;
    if (report_) report_(progress());
  }

  /// Counts a document that could not be read, or throws its error where it may not be skipped.
  bool skip(const Document& document) {
    try {
      std::rethrow_exception(document.error);
    } catch (const Error& error) {
      if (!options_.skip_bad_documents || error.code() != ExitCode::data || document.where.empty()) throw;
      if (skipped_++ == 0) first_problem_ = error.what();
    }
    return true;
  }

  /// The writer of the next document.
  Output& next_output() {
    ++documents_;
    Output& output = validation_ && documents_ % options_.validation_every == 0 ? *validation_ : train_;
    ++output.file.info.documents;
    return output;
  }

  void write_part(Output& output, const std::string& text) {
    output.add_part(tokenizer_, tokenizer_.encode(text));
    output.file.info.text_bytes += std::ssize(text);
    if (report_) report_(progress());
  }

  void end_document(Output& output) {
    output.add_part(tokenizer_, {tokenizer_.end_of_document()});
    output.writer.end_document();
  }

  const TokenizeOptions options_;
  const Tokenizer& tokenizer_;
  const std::string tokenizer_name_;
  const std::function<void(const TokenizeProgress&)> report_;
  Output train_;
  std::optional<Output> validation_;
  std::vector<Document> pending_;
  int64_t pending_bytes_ = 0, documents_ = 0, skipped_ = 0;
  std::string first_problem_;  // of the first document that was skipped
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

TextTokenizer::TextTokenizer(const TokenizeOptions& options, const Tokenizer& tokenizer,
                             const std::string& name, std::function<void(const TokenizeProgress&)> progress)
    : impl_(std::make_unique<Impl>(options, tokenizer, name, std::move(progress))) {}

TextTokenizer::~TextTokenizer() = default;

void TextTokenizer::read(const std::string& input) { impl_->read(input); }

std::vector<TokenizedFile> TextTokenizer::finish() { return impl_->finish(); }

TokenizeProgress TextTokenizer::progress() const { return impl_->progress(); }

}  // namespace sluice
