// Loads tensors from files of any layout into the tensors or slices that this rank holds.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "checkpoint/manifest.h"
#include "checkpoint/mxfp4.h"
#include "checkpoint/store.h"
#include "checkpoint/stored_tensors.h"
#include "checkpoint/tensor_problems.h"
#include "core/context.h"
#include "core/io.h"
#include "core/strict_json.h"

namespace sluice {
namespace {

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr int64_t kStaged = int64_t{1} << 20;  // bytes converted at a time on the way to a GPU

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

/// The requested tensors of one kind of file, and the stored ones.
struct Wish {
  StoredTensors& stored;
  const std::vector<NamedTensor>& targets;
  const std::vector<TensorShape>*
      whole;  // all tensors of the model if the targets are a part of them; else null
  const WeightAdoption* adoption = nullptr;

  /// Where a tensor of the model is stored under another name or in another order; else null.
  const WeightSource* source(std::string_view name) const {
    return adoption ? adoption->map.find(name) : nullptr;
  }
  /// Whether it is stored in MXFP4 alone.
  bool is_mxfp4(const WeightSource& from) const {
    return from.mxfp4 && !stored.find(from.name) && stored.find(from.name + "_blocks");
  }
  /// nullptr if it is not stored.
  const StoredTensor* find(const std::string& name) const {
    const WeightSource* from = source(name);
    return stored.find(from ? from->name : name);
  }
};

/// All tensors of the model: those given in `whole`, or the targets as whole tensors.
std::vector<TensorShape> wholes(const Wish& wish) {
  std::vector<TensorShape> all;
  std::map<std::string_view, size_t> index;
  if (wish.whole) all = *wish.whole;
  for (size_t i = 0; i < all.size(); ++i)
    SLUICE_CHECK(index.emplace(all[i].name, i).second, "tensor '{}' is in the model twice", all[i].name);
  std::set<std::string_view> seen;
  for (const NamedTensor& t : wish.targets) {
    check_slice(t);
    const bool first = seen.insert(t.name).second;
    SLUICE_CHECK(first || is_slice(t), "tensor '{}' is requested twice", t.name);
    const auto found = index.find(t.name);
    SLUICE_CHECK(!wish.whole || found != index.end(), "tensor '{}' is not part of the model", t.name);
    if (found == index.end()) {
      all.push_back({t.name, whole_shape(t), t.tensor.dtype});
      index.emplace(t.name, all.size() - 1);  // t.name outlives this
    } else {
      const TensorShape& known = all[found->second];
      SLUICE_CHECK(known.shape == whole_shape(t) && known.dtype == t.tensor.dtype,
                   "tensor '{}' is {} {}, the model's is {} {}", t.name, shape_text(whole_shape(t)),
                   dtype_name(t.tensor.dtype), shape_text(known.shape), dtype_name(known.dtype));
    }
  }
  return all;
}

bool can_convert(const StoredTensor& stored, DType dtype) {
  return convertible({stored.name, stored.dtype, stored.shape, 0, 0}, dtype);
}

/// An output head that duplicates the embedding, as some programs store tied models.
bool is_tied_copy(StoredTensors& stored, const StoredTensor& head) {
  const StoredTensor* embedding = head.name == kHead ? stored.find(kEmbedding) : nullptr;
  if (!embedding || embedding->dtype != head.dtype || embedding->shape != head.shape) return false;
  if (!head.problem.empty() || !embedding->problem.empty()) return false;
  std::vector<unsigned char> a, b;
  for (int64_t begin = 0; begin < head.bytes; begin += kStaged) {
    const int64_t n = std::min(kStaged, head.bytes - begin);
    if (std::memcmp(stored.read(head, begin, n, a), stored.read(*embedding, begin, n, b),
                    static_cast<size_t>(n)) != 0)
      return false;
  }
  return true;
}

/// The differences of a tensor in MXFP4; adds the names of its two tensors.
void compare_mxfp4(const Wish& wish, const WeightSource& from, std::set<std::string, std::less<>>& names,
                   TensorProblems& problems) {
  for (const char* part : {"_blocks", "_scales"}) {
    TensorShape w{from.name + part, from.mxfp4->scales, DType::u8};
    if (part[1] == 'b') w.shape.push_back(kMxfp4Block / 2);
    if (!names.insert(w.name).second) continue;  // another part of the same stored tensor
    const StoredTensor* found = wish.stored.find(w.name);
    if (!found)
      problems.missing(w);
    else if (found->shape != w.shape)
      problems.shape(*found, w);
    else if (found->dtype != "U8")
      problems.other(fmt::format("type: {} is {}, MXFP4 is U8", w.name, printable(found->dtype)));
    else if (!found->problem.empty())
      problems.other(fmt::format("incomplete: {}: {}", w.name, found->problem));
  }
}

/// Whether a tensor of the model holds fewer digits than its stored values.
bool rounds(const Wish& wish, const std::string& name, DType dtype) {
  const WeightSource* from = wish.source(name);
  const StoredTensor* stored = wish.find(name);
  if (dtype != DType::bf16 || !stored) return false;
  return stored->dtype == "F32" || stored->dtype == "F64" || stored->dtype == "F16" ||
         (from && from->plus != 0);
}

/// All differences between the requested and the stored tensors; equal on all ranks that give the whole
/// model.
WeightReport compare_names(const Wish& wish, bool exact, TensorProblems& problems) {
  WeightReport report;
  std::set<std::string, std::less<>> names;
  for (TensorShape w : wholes(wish)) {
    const std::string name = w.name;
    if (const WeightSource* from = wish.source(name)) {
      if (wish.is_mxfp4(*from)) {
        compare_mxfp4(wish, *from, names, problems);
        ++report.loaded;
        continue;
      }
      w.name = from->name;
      w.shape = from->shape;
    }
    const StoredTensor* found = wish.stored.find(w.name);
    if (!found && wish.adoption && wish.adoption->may_be_missing && wish.adoption->may_be_missing(name)) {
      report.missing.push_back(name);
      continue;
    }
    ++report.loaded;
    report.rounded = report.rounded || rounds(wish, name, w.dtype);
    if (!names.insert(w.name).second) continue;  // another part of the same stored tensor
    if (!found)
      problems.missing(w);
    else if (found->shape != w.shape)
      problems.shape(*found, w);
    else if (exact ? found->dtype != safetensors_dtype(w.dtype) : !can_convert(*found, w.dtype))
      problems.other(fmt::format("type: {} is {}, the model wants {}", w.name, printable(found->dtype),
                                 dtype_name(w.dtype)));
    else if (!found->problem.empty())
      problems.other(fmt::format("incomplete: {}: {}", w.name, found->problem));
  }
  for (const auto& [name, stored] : wish.stored.tensors()) {
    if (names.count(name)) continue;
    if (is_tied_copy(wish.stored, stored) || (wish.adoption && wish.adoption->map.ignores(name)))
      report.ignored.push_back(name);
    else
      problems.unexpected(stored);
  }
  return report;
}

/// The model_type in a config.json beside the weights; empty if there is no readable one.
std::string stored_model_type(const std::string& path) {
  const std::filesystem::path folder =
      io::is_directory(path) ? std::filesystem::path(path) : std::filesystem::path(path).parent_path();
  const std::string file = folder / "config.json";
  if (!io::exists(file)) return "";
  try {
    const nlohmann::json config = parse_strict_json(io::read_file(file), file);
    return fmt::format("model_type {}, ", printable(config.at("model_type").get<std::string>()));
  } catch (const std::exception&) {
    return "";  // damage is reported where the file is needed
  }
}

/// Throws one Error(data) with all of them.
void refuse(const std::string& path, const TensorProblems& problems) {
  if (problems.empty()) return;
  fail(ExitCode::data, "{} does not fit the model ({}{} tensor{}):\n  {}", path, stored_model_type(path),
       problems.count(), problems.count() == 1 ? "" : "s",
       fmt::join(problems.lines(io::is_directory(path) ? "folder" : "file"), "\n  "));
}

/// Elements [begin, begin + count) of a target, as rank 1.
Tensor part_of(const Tensor& t, int64_t begin, int64_t count) {
  Tensor part = t;
  part.data = static_cast<char*>(t.data) + begin * dtype_size(t.dtype);
  part.rank = 1;
  part.shape = {count};
  return part;
}

/// Converts `count` stored values into a target of as many elements, through at most kStaged bytes.
void put_values(const unsigned char* from, const std::string& dtype, const Tensor& to, Context* ctx) {
  const int64_t size = safetensors_bits(dtype) / 8;
  const auto convert = [&](const unsigned char* values, const Tensor& host) {
    convert_values(values, {"", dtype, {host.numel()}, 0, host.numel() * size}, host);
  };
  if (to.device == Device::cpu) return convert(from, to);
  if (dtype == safetensors_dtype(to.dtype)) return write_tensor(*ctx, to, from);
  const int64_t at_once = kStaged / dtype_size(to.dtype), count = to.numel();
  std::vector<char> staged(static_cast<size_t>(std::min(at_once, count) * dtype_size(to.dtype)));
  for (int64_t begin = 0; begin < count; begin += at_once) {
    const Tensor part = part_of(to, begin, std::min(at_once, count - begin));
    Tensor host = part;
    host.device = Device::cpu;
    host.data = staged.data();
    convert(from + begin * size, host);
    write_tensor(*ctx, part, staged.data());
  }
}

/// Fills elements of a target from a transposed matrix or the like, a block at a time.
void fill_strided(const Wish& wish, const NamedTensor& w, const WeightSource& from, Context* ctx) {
  const StoredTensor& stored = *wish.stored.find(from.name);
  const WeightSource::Strides& strides = *from.strides;
  const int64_t size = safetensors_bits(stored.dtype) / 8, begin = w.begin, all = w.tensor.numel();
  if (all == 0) return;
  // What lies between the first and the last of the rows: mapped, not copied, where it is in one file.
  const int64_t first = strides.first + begin / strides.columns * strides.row,
                last = strides.first + (begin + all - 1) / strides.columns * strides.row +
                       (strides.columns - 1) * strides.column;
  std::vector<unsigned char> buffer, gathered;
  const unsigned char* const values =
      wish.stored.read(stored, first * size, (last + 1 - first) * size, buffer);
  const int64_t at_once = std::max<int64_t>(kStaged / size, 1);
  for (int64_t done = 0; done < all; done += at_once) {
    const int64_t count = std::min(at_once, all - done);
    gathered.resize(static_cast<size_t>(count * size));
    strides.for_each(begin + done, count, [&](int64_t i, int64_t place) {
      copy_element(gathered.data() + i * size, values + (place - first) * size, size);
    });
    put_values(gathered.data(), stored.dtype, part_of(w.tensor, done, count), ctx);
  }
}

/// Fills elements of a target row by row.
void fill_mxfp4(const Wish& wish, const NamedTensor& w, const WeightSource& from, Context* ctx) {
  const WeightSource::Mxfp4& rows = *from.mxfp4;
  const StoredTensor &blocks = *wish.stored.find(from.name + "_blocks"),
                     &scales = *wish.stored.find(from.name + "_scales");
  const int64_t columns = rows.columns, end = w.begin + w.tensor.numel();
  std::vector<unsigned char> block_buffer, scale_buffer;
  std::vector<float> values(static_cast<size_t>(columns));
  for (int64_t at = w.begin; at < end;) {
    const int64_t row = at / columns, stored_row = rows.first + row * rows.step,
                  next = std::min(end, (row + 1) * columns);
    mxfp4_values(
        wish.stored.read(blocks, stored_row * (columns / 2), columns / 2, block_buffer),
        wish.stored.read(scales, stored_row * (columns / kMxfp4Block), columns / kMxfp4Block, scale_buffer),
        columns, values.data());
    put_values(reinterpret_cast<const unsigned char*>(values.data() + at % columns), "F32",
               part_of(w.tensor, at - w.begin, next - at), ctx);
    at = next;
  }
}

/// Fills elements of a target from values in another order, or changed by a constant.
void fill_from(const Wish& wish, const NamedTensor& w, const WeightSource& from, Context* ctx) {
  const StoredTensor& stored = *wish.stored.find(from.name);
  const int64_t size = safetensors_bits(stored.dtype) / 8;
  const int64_t begin = w.begin, end = w.begin + w.tensor.numel();
  std::vector<unsigned char> buffer;
  std::vector<double> changed;
  const auto put = [&](int64_t at, int64_t count, int64_t source) {
    const unsigned char* values = wish.stored.read(stored, source * size, count * size, buffer);
    const Tensor part = part_of(w.tensor, at - begin, count);
    if (from.plus == 0) return put_values(values, stored.dtype, part, ctx);
    changed.resize(static_cast<size_t>(count));
    convert_values(values, {"", stored.dtype, {count}, 0, count * size},
                   Tensor(changed.data(), DType::f64, {count}));
    for (double& x : changed) x += from.plus;
    put_values(reinterpret_cast<const unsigned char*>(changed.data()), "F64", part, ctx);
  };
  if (from.runs.empty()) return put(begin, end - begin, begin);
  int64_t at = 0;  // in the whole tensor of the model
  for (const WeightSource::Run& run : from.runs) {
    const int64_t first = std::max(begin, at), last = std::min(end, at + run.count);
    if (first < last) put(first, last - first, run.begin + (first - at));
    at += run.count;
  }
}

/// Fills the targets from the stored pieces. If checksums are known, the checksum of every piece that is read
/// whole is computed again from the filled memory (on a GPU, from its source in host memory), so that the run
/// starts from exactly what was saved.
void fill(const Wish& wish, Context* ctx, bool checksums) {
  for (const NamedTensor& w : wish.targets) {
    SLUICE_CHECK(ctx || w.tensor.device == Device::cpu, "{}: a tensor on a GPU needs a context", w.name);
    const WeightSource* source = wish.source(w.name);
    if (source && wish.is_mxfp4(*source)) {
      fill_mxfp4(wish, w, *source, ctx);
      continue;
    }
    if (source && wish.find(w.name)) {
      source->strides ? fill_strided(wish, w, *source, ctx) : fill_from(wish, w, *source, ctx);
      continue;
    }
    const StoredTensor* found = wish.stored.find(w.name);
    if (!found) continue;  // it may be missing
    const StoredTensor& stored = *found;
    // Types below one byte are neither converted nor sliced; after the checks above, every element has whole
    // bytes.
    const int64_t size = safetensors_bits(stored.dtype) / 8;
    const int64_t begin = w.begin * size, end = begin + w.tensor.numel() * size;
    for (const StoredPiece& piece : stored.pieces) {
      const int64_t from = std::max(begin, piece.begin), to = std::min(end, piece.end);
      if (from >= to) continue;
      const unsigned char* data = wish.stored.data(piece) + (from - piece.begin);
      const Tensor part = part_of(w.tensor, (from - begin) / size, (to - from) / size);
      put_values(data, stored.dtype, part, ctx);
      const bool whole_piece = from == piece.begin && to == piece.end;
      if (!checksums || !whole_piece) continue;
      const void* filled = part.device == Device::cpu ? part.data : data;
      if (checksum(filled, to - from) != piece.xxh3_128)
        fail(ExitCode::data, "{}: the checksum of tensor {} as read differs from the manifest's",
             wish.stored.path(piece), w.name);
    }
  }
}

/// A parameter whose weights are stored, and whose moments are wanted and are not.
void compare_frozen(const Wish& weights, const Wish& moments, TensorProblems& problems) {
  constexpr std::string_view kFirst = ".m";
  for (const TensorShape& t : wholes(moments)) {
    if (!t.name.ends_with(kFirst) || moments.stored.find(t.name)) continue;
    const std::string weight = t.name.substr(0, t.name.size() - kFirst.size());
    if (!weights.stored.find(weight)) continue;
    problems.other(fmt::format(
        "{} is there without moments: it was frozen when this was saved, and is to be trained now "
        "(optimizer.rules); train.init_from starts from the weights alone",
        printable(weight)));
    return;
  }
}

}  // namespace

void load_checkpoint(const std::string& path, const std::vector<NamedTensor>& weights,
                     const std::vector<NamedTensor>& optimizer, Context* ctx, const WholeModel* whole) {
  const Manifest manifest = read_manifest(path);
  StoredTensors model(path, manifest, kWeightsKind, StoredTensors::Check::size);
  StoredTensors optim(path, manifest, kOptimizerKind, StoredTensors::Check::size);
  const Wish wishes[] = {{model, weights, whole ? &whole->weights : nullptr},
                         {optim, optimizer, whole ? &whole->optimizer : nullptr}};
  TensorProblems problems;
  for (const Wish& wish : wishes) compare_names(wish, true, problems);
  compare_frozen(wishes[0], wishes[1], problems);
  refuse(path, problems);
  for (const Wish& wish : wishes) fill(wish, ctx, true);
}

namespace {

/// The tensors of weights at a path, as load_weights accepts it.
StoredTensors stored_weights(const std::string& path) {
  if (!io::is_directory(path)) return StoredTensors(path);
  if (io::exists(path + "/" + kManifestName)) {
    const Manifest manifest = read_manifest(path);
    if (const std::string problem = shards_problem(manifest, kWeightsKind); !problem.empty())
      fail(ExitCode::data, "{}: {}", path, problem);
    return StoredTensors(path, manifest, kWeightsKind, StoredTensors::Check::checksum);
  }
  if (io::exists(path + "/" + kWeights)) return StoredTensors(path + "/" + kWeights);
  if (io::exists(path + "/" + kWeightsIndex)) return StoredTensors::from_index(path);
  // The folder of a run or of its checkpoints.
  const std::string folder = io::is_directory(path + "/ckpt") ? path + "/ckpt" : path;
  const CheckpointInfo newest = newest_valid_checkpoint(folder);
  if (newest.path.empty())
    fail(ExitCode::data, "{}: neither a checkpoint nor a model: no {}, {} or {}", path, kManifestName,
         kWeights, kWeightsIndex);
  return stored_weights(newest.path);
}

WeightReport take_weights(const std::string& path, const std::vector<NamedTensor>& weights, Context* ctx,
                          const std::vector<TensorShape>* whole, const WeightAdoption& adoption) {
  StoredTensors stored = stored_weights(path);
  const Wish wish{stored, weights, whole, &adoption};
  TensorProblems problems;
  WeightReport report = compare_names(wish, false, problems);
  refuse(path, problems);
  fill(wish, ctx, false);
  return report;
}

}  // namespace

WeightReport load_weights(const std::string& path, const std::vector<NamedTensor>& weights, Context* ctx,
                          const std::vector<TensorShape>* whole, const WeightAdoption& adoption) {
  return take_weights(path, weights, ctx, whole, adoption);
}

WeightReport compare_weights(const std::string& path, const std::vector<TensorShape>& whole,
                             const WeightAdoption& adoption) {
  return take_weights(path, {}, nullptr, &whole, adoption);
}

}  // namespace sluice
