#include "checkpoint/safetensors.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "core/parallel_for.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr int64_t kMaxHeader = int64_t{16} << 20;
constexpr size_t kMaxTensors = 1'000'000;
constexpr int64_t kDataAlignment = 64;

/// Bits per element; 0 for an unknown dtype.
int64_t bits_of(std::string_view dtype) {
  struct Row {
    std::string_view name;
    int bits;
  };
  constexpr Row rows[] = {{"BOOL", 8},    {"U8", 8},   {"I8", 8},   {"F8_E5M2", 8}, {"F8_E4M3", 8},
                          {"F8_E8M0", 8}, {"I16", 16}, {"U16", 16}, {"F16", 16},    {"BF16", 16},
                          {"I32", 32},    {"U32", 32}, {"F32", 32}, {"F64", 64},    {"I64", 64},
                          {"U64", 64},    {"C64", 64}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}};
  for (const Row& row : rows)
    if (row.name == dtype) return row.bits;
  return 0;
}

/// Parses only {"name": {"dtype": D, "shape": [..], "data_offsets": [b, e]}, "__metadata__": {"k": "v"}}.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(SafetensorsHeader& header) : header_(header) {}
  const std::string& problem() const { return problem_; }

  bool start_object(std::size_t) override {
    if (where_ == Where::start) return to(Where::top);
    if (where_ == Where::tensor_open) return to(Where::tensor);
    if (where_ == Where::metadata_open) return to(Where::metadata);
    return unexpected("an object");
  }
  bool end_object() override {
    if (where_ == Where::tensor) {
      if (seen_ != (kDtype | kShape | kOffsets)) return stop("needs dtype, shape and data_offsets");
      if (offsets_.size() != 2) return stop("data_offsets must be two numbers");
      entry().begin = offsets_[0];
      entry().end = offsets_[1];
      return to(Where::top);
    }
    return to(where_ == Where::metadata ? Where::top : Where::end);
  }
  bool key(string_t& text) override {
    if (where_ == Where::top) {
      if (text == "__metadata__") {
        if (std::exchange(metadata_seen_, true)) return stop("__metadata__ occurs twice");
        return to(Where::metadata_open);
      }
      if (header_.entries.size() == kMaxTensors)
        return stop(fmt::format("more than {} tensors", kMaxTensors));
      header_.entries.emplace_back().name = std::move(text);
      seen_ = 0;
      offsets_.clear();
      return to(Where::tensor_open);
    }
    if (where_ == Where::metadata) {
      key_ = std::move(text);
      if (header_.metadata.count(key_))
        return stop(fmt::format("metadata key '{}' occurs twice", printable(key_)));
      return true;
    }
    const int field = text == "dtype"          ? kDtype
                      : text == "shape"        ? kShape
                      : text == "data_offsets" ? kOffsets
                                               : 0;
    if (!field) return stop(fmt::format("unknown key '{}'", printable(text)));
    if (seen_ & field) return stop(fmt::format("key '{}' occurs twice", text));
    seen_ |= field;
    field_ = field;
    return true;
  }
  bool start_array(std::size_t) override {
    if (where_ != Where::tensor || field_ == kDtype) return unexpected("a list");
    return to(Where::list);
  }
  bool end_array() override { return to(Where::tensor); }
  bool number_unsigned(number_unsigned_t value) override {
    if (where_ != Where::list) return unexpected("a number");
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<int64_t>::max()))
      return stop("number above 2^63");
    (field_ == kShape ? entry().shape : offsets_).push_back(static_cast<int64_t>(value));
    return true;
  }
  bool string(string_t& text) override {
    if (where_ == Where::metadata) {
      header_.metadata.emplace(std::move(key_), std::move(text));
      return true;
    }
    if (where_ != Where::tensor || field_ != kDtype) return unexpected("a string");
    entry().dtype = std::move(text);
    return true;
  }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return unexpected("a fraction"); }
  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool binary(binary_t&) override { return unexpected("binary data"); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    problem_ = printable(error.what(), 300);
    return false;
  }

 private:
  enum class Where { start, top, tensor_open, tensor, list, metadata_open, metadata, end };
  enum : int { kDtype = 1, kShape = 2, kOffsets = 4 };

  SafetensorsEntry& entry() { return header_.entries.back(); }
  bool to(Where where) {
    where_ = where;
    return true;
  }
  bool stop(const std::string& reason) {
    const bool inside = where_ == Where::tensor_open || where_ == Where::tensor || where_ == Where::list;
    problem_ = inside ? fmt::format("tensor '{}': {}", printable(entry().name), reason) : reason;
    return false;
  }
  bool unexpected(const char* what) { return stop(fmt::format("unexpected {}", what)); }

  SafetensorsHeader& header_;
  Where where_ = Where::start;
  int seen_ = 0, field_ = 0;
  bool metadata_seen_ = false;
  std::vector<int64_t> offsets_;
  std::string key_, problem_;
};

/// Empty if dtype, shape and offsets of an entry agree; otherwise what is wrong.
std::string size_problem(const SafetensorsEntry& entry) {
  const int64_t bits = bits_of(entry.dtype);
  if (!bits) return fmt::format("unknown dtype '{}'", printable(entry.dtype));
  int64_t total = bits;
  for (const int64_t dim : entry.shape)
    if (__builtin_mul_overflow(total, dim, &total)) return "its shape overflows";
  if (total % 8) return "its bits do not fill whole bytes";
  if (entry.end < entry.begin || entry.end - entry.begin != total / 8)
    return fmt::format("data_offsets [{}, {}] do not hold the {} bytes of {}", entry.begin, entry.end,
                       total / 8, describe(entry));
  return "";
}

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu,
                 fraction = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal, exact in f32
  return sign ? -magnitude : magnitude;
}

template <class T>
T load(const unsigned char* from) {  // tensors in files of other programs may be unaligned
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

double from_f64(const unsigned char* p) { return load<double>(p); }
float from_f32(const unsigned char* p) { return load<float>(p); }
float from_bf16(const unsigned char* p) { return static_cast<float>(load<bf16>(p)); }
float from_f16(const unsigned char* p) { return half_to_float(load<uint16_t>(p)); }

template <class To, class From>
void convert_all(const unsigned char* from, int64_t step, const Tensor& to, From&& read) {
  To* out = to.as<To>();
  parallel_for(to.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (std::is_same_v<To, bf16>) {
        out[i] = bf16(static_cast<float>(read(from + i * step)));
      } else {
        out[i] = static_cast<To>(read(from + i * step));
      }
    }
  });
}

template <class To>
void convert_to(const unsigned char* from, std::string_view dtype, const Tensor& to) {
  if (dtype == "F64") return convert_all<To>(from, 8, to, from_f64);
  if (dtype == "F32") return convert_all<To>(from, 4, to, from_f32);
  if (dtype == "BF16") return convert_all<To>(from, 2, to, from_bf16);
  return convert_all<To>(from, 2, to, from_f16);
}

bool is_float(std::string_view dtype) {
  return dtype == "F64" || dtype == "F32" || dtype == "BF16" || dtype == "F16";
}

}  // namespace

SafetensorsHeader parse_safetensors(const unsigned char* file, int64_t bytes, const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    fail(ExitCode::data, "{}: not a valid safetensors file: {}", path, reason);
  };
  if (bytes < 8) refuse(fmt::format("{} bytes are too few", bytes));
  uint64_t length;
  std::memcpy(&length, file, 8);
  if (length > static_cast<uint64_t>(kMaxHeader))
    refuse(fmt::format("header of {} bytes, at most {} are accepted", length, kMaxHeader));
  if (static_cast<int64_t>(length) > bytes - 8)
    refuse(fmt::format("header of {} bytes in a file of {}", length, bytes));
  const char* text = reinterpret_cast<const char*>(file + 8);
  if (length == 0 || text[0] != '{') refuse("the header does not begin with '{'");
  // The parser treats a NUL byte as the end of input.
  if (std::memchr(text, 0, length)) refuse("the header contains a NUL byte");

  SafetensorsHeader header;
  header.data_begin = 8 + static_cast<int64_t>(length);
  HeaderReader reader(header);
  if (!nlohmann::json::sax_parse(text, text + length, &reader)) refuse(reader.problem());

  auto& entries = header.entries;
  for (const SafetensorsEntry& entry : entries)
    if (const std::string problem = size_problem(entry); !problem.empty())
      refuse(fmt::format("tensor '{}': {}", printable(entry.name), problem));
  const auto by_offset = [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  };
  std::stable_sort(entries.begin(), entries.end(), by_offset);
  int64_t covered = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.begin != covered)
      refuse(fmt::format("tensor '{}' begins at byte {} of the data, the one before it ends at {}",
                         printable(entry.name), entry.begin, covered));
    covered = entry.end;
  }
  const int64_t data = bytes - header.data_begin;
  if (covered != data) refuse(fmt::format("the tensors take {} bytes, the file holds {}", covered, data));
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  if (const auto twice = std::adjacent_find(names.begin(), names.end()); twice != names.end())
    refuse(fmt::format("tensor '{}' occurs twice", printable(*twice)));
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path, bool follow_links)
    : file_(path, follow_links), header_(parse_safetensors(file_.data(), file_.size(), path)) {
  for (size_t i = 0; i < header_.entries.size(); ++i) by_name_.emplace(header_.entries[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &header_.entries[found->second];
}

std::string make_safetensors_header(std::vector<SafetensorsEntry>& entries) {
  // Descending element size aligns every tensor to its elements.
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    const int64_t size_a = bits_of(a.dtype), size_b = bits_of(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  std::string text = R"({"__metadata__":{"format":"pt"})";
  std::set<std::string_view> names;
  int64_t offset = 0;
  for (SafetensorsEntry& entry : entries) {
    int64_t bytes = bits_of(entry.dtype) / 8;
    for (const int64_t dim : entry.shape) bytes *= dim;
    entry.begin = offset;
    entry.end = offset += bytes;
    SLUICE_CHECK(names.insert(entry.name).second, "safetensors: tensor '{}' is given twice", entry.name);
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                        nlohmann::json(entry.name).dump(), entry.dtype, fmt::join(entry.shape, ","),
                        entry.begin, entry.end);
  }
  text += '}';
  text.append(static_cast<size_t>(-(8 + std::ssize(text)) & (kDataAlignment - 1)), ' ');
  SLUICE_CHECK(std::ssize(text) <= kMaxHeader,
               "safetensors: the header takes {} bytes, at most {} can be read back", text.size(),
               kMaxHeader);
  const uint64_t length = text.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + text;
}

int64_t safetensors_bits(std::string_view dtype) { return bits_of(dtype); }

std::optional<int64_t> safetensors_bytes(std::string_view dtype, const std::vector<int64_t>& shape) {
  int64_t bits = bits_of(dtype);
  if (!bits) return {};
  for (const int64_t dim : shape)
    if (__builtin_mul_overflow(bits, dim, &bits)) return {};
  if (bits % 8) return {};
  return bits / 8;
}

const char* safetensors_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f64:
      return "F64";
    case DType::i32:
      return "I32";
    case DType::u8:
      return "U8";
  }
  return "?";
}

SafetensorsEntry safetensors_entry(const std::string& name, const Tensor& tensor) {
  return {name, safetensors_dtype(tensor.dtype), {tensor.shape.begin(), tensor.shape.begin() + tensor.rank}};
}

bool convertible(const SafetensorsEntry& entry, DType dtype) {
  if (entry.dtype == safetensors_dtype(dtype)) return true;
  return is_float(entry.dtype) && is_float(safetensors_dtype(dtype));
}

void convert_values(const unsigned char* from, const SafetensorsEntry& entry, const Tensor& tensor) {
  SLUICE_CHECK(convertible(entry, tensor.dtype), "{} cannot be read as {}", describe(entry),
               tensor.describe());
  if (entry.dtype == safetensors_dtype(tensor.dtype)) {
    SLUICE_CHECK(entry.end - entry.begin == tensor.bytes(), "{} into {}", describe(entry), tensor.describe());
    if (tensor.bytes()) std::memcpy(tensor.data, from, static_cast<size_t>(tensor.bytes()));
    return;
  }
  SLUICE_CHECK((entry.end - entry.begin) * 8 == tensor.numel() * bits_of(entry.dtype), "{} into {}",
               describe(entry), tensor.describe());
  switch (tensor.dtype) {
    case DType::f32:
      return convert_to<float>(from, entry.dtype, tensor);
    case DType::bf16:
      return convert_to<bf16>(from, entry.dtype, tensor);
    case DType::f64:
      return convert_to<double>(from, entry.dtype, tensor);
    case DType::i32:
    case DType::u8:
      break;
  }
  fail(ExitCode::internal, "{} into {}: only floating-point types are converted", describe(entry),
       tensor.describe());
}

std::string describe(const SafetensorsEntry& entry) {
  return fmt::format("({}) {}", fmt::join(entry.shape, ", "), printable(entry.dtype));
}

}  // namespace sluice
