#include "support/stored.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"

namespace sluice::fuzz {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostData = int64_t{1} << 18;

bool is_open(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && *found == "*";
}

/// Bytes of a tensor as its header says; 0 where it says nothing that could be stored.
int64_t bytes_of(const Json& tensor) {
  const auto dtype = tensor.find("dtype"), shape = tensor.find("shape");
  if (dtype == tensor.end() || shape == tensor.end() || !dtype->is_string() || !shape->is_array()) return 0;
  std::vector<int64_t> dims;
  for (const Json& dim : *shape) {
    if (!dim.is_number_integer() || dim.get<int64_t>() < 0) return 0;
    dims.push_back(dim.get<int64_t>());
  }
  const int64_t bytes = safetensors_bytes(dtype->get<std::string>(), dims).value_or(0);
  return bytes > kMostData ? 0 : bytes;
}

/// The header's text with all offsets, and the size of the data.
std::pair<std::string, int64_t> tiled(const std::string& header) {
  Json json = Json::parse(header, nullptr, false);
  if (!json.is_object()) return {header, 0};
  int64_t end = 0;
  for (auto& [name, tensor] : json.items()) {
    if (!tensor.is_object() || name == "__metadata__") continue;
    if (is_open(tensor, "data_offsets")) tensor["data_offsets"] = {end, end + bytes_of(tensor)};
    const auto offsets = tensor.find("data_offsets");
    if (offsets == tensor.end() || !offsets->is_array() || offsets->size() != 2) continue;
    const Json& last = (*offsets)[1];
    if (last.is_number_integer() && last.get<int64_t>() > end && last.get<int64_t>() <= kMostData)
      end = last.get<int64_t>();
  }
  return {json.dump(-1, ' ', false, Json::error_handler_t::replace), end};
}

/// Sizes and checksums of the files, offsets and checksums of the tensors, and the last line.
std::string signed_manifest(const std::string& text, const Files& files) {
  Json manifest = Json::parse(text, nullptr, false);
  std::string before = text;
  if (manifest.is_object()) {
    const auto content_of = [&](const Json& record, const char* key) -> const std::string* {
      const auto name = record.find(key);
      if (name == record.end() || !name->is_string()) return nullptr;
      for (const auto& [file, content] : files)
        if (file == name->get<std::string>()) return &content;
      return nullptr;
    };
    if (manifest.contains("files") && manifest["files"].is_array())
      for (Json& record : manifest["files"]) {
        const std::string* content = record.is_object() ? content_of(record, "name") : nullptr;
        if (!content) continue;
        if (is_open(record, "bytes")) record["bytes"] = content->size();
        if (is_open(record, "xxh3_128")) record["xxh3_128"] = checksum(*content);
      }
    if (manifest.contains("tensors") && manifest["tensors"].is_array())
      for (Json& record : manifest["tensors"]) {
        const std::string* content = record.is_object() ? content_of(record, "file") : nullptr;
        if (!content || !record.contains("name") || !record["name"].is_string()) continue;
        try {
          const auto header = parse_safetensors(reinterpret_cast<const unsigned char*>(content->data()),
                                                std::ssize(*content), "");
          std::string name = record["name"];
          const auto slice = record.find("slice");
          if (slice != record.end() && slice->is_array() && !slice->empty()) name += "@" + (*slice)[0].dump();
          for (const SafetensorsEntry& entry : header.entries) {
            if (entry.name != name) continue;
            if (is_open(record, "offset")) record["offset"] = header.data_begin + entry.begin;
            if (is_open(record, "xxh3_128"))
              record["xxh3_128"] =
                  checksum(content->data() + header.data_begin + entry.begin, entry.end - entry.begin);
          }
        } catch (const Error&) {  // the header was damaged: then nothing can be put in
        }
      }
    before = manifest.dump(-1, ' ', false, Json::error_handler_t::replace);
    before = before.substr(0, before.rfind('}'));
    if (before.ends_with('{')) return text;
    before += ",\n";
  }
  return before + fmt::format("\"xxh3_128\": \"{}\"}}\n", checksum(before));
}

}  // namespace

std::string safetensors_of(const std::string& header) {
  const auto [text, bytes] = tiled(header);
  const uint64_t length = text.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  out += text;
  for (int64_t i = 0; i < bytes; ++i) out += static_cast<char>(i % 2 ? 0x3e + i % 3 : i % 251);
  return out;
}

Files completed(Files files) {
  for (auto& [name, content] : files)
    if (name.ends_with(".safetensors") && content.starts_with('{')) content = safetensors_of(content);
  for (auto& [name, content] : files)
    if (name == kManifestName) content = signed_manifest(content, files);
  return files;
}

void write_all(const Files& files, const std::string& folder) {
  for (const auto& [name, content] : files)
    if (!name.empty() && name.find('/') == std::string::npos) write(folder + "/" + name, content);
}

}  // namespace sluice::fuzz
