#pragma once
// Documents of text and JSONL files.
#include <functional>
#include <string>
#include <string_view>

namespace sluice {

struct DocumentFormat {
  std::string format = "auto";  // by the file's name; text or jsonl
  std::string key = "text";     // JSONL: of the text
};

/// Whether a file of this name holds JSONL. Error(usage) for .zst.
bool is_jsonl_file(std::string name, const std::string& format);

/// Whether a line separates documents of a text file.
bool is_document_separator(std::string_view line);

/// The text of one document of JSONL: the string under `key` of the object in `line`. Error(data) names
/// `where`, as "file:line", and the reason, followed by `hint`.
std::string text_of_json_line(std::string_view line, const std::string& key, const std::string& where,
                              std::string_view hint = {});

/// Calls on_text for every document of a file, or of standard input ("-"), gzipped or not. A long text comes
/// in parts of about a MiB, cut behind a line end in front of a letter, where every known pre-tokenizer cuts,
/// too. Error(no_input), Error(data) with file and line.
void read_documents(const std::string& input, const DocumentFormat& format,
                    const std::function<void(std::string)>& on_text);

}  // namespace sluice
