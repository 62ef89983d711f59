#pragma once
// model.safetensors in the layout of another program, from a checkpoint.
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/weight_map.h"
#include "core/io.h"

namespace sluice {

/// Writes the weights of a checkpoint as one safetensors file. map: how the file names and orders them, the
/// inverse of loading. dtype: BF16 or F32, rounded to nearest even; empty: as they are stored. Tensors that
/// are copied unchanged keep their bits; w - 1 of a norm is exact for w >= 1/2. Every byte that is read is
/// verified against the manifest.
void write_weights(const std::string& checkpoint, const Manifest& manifest, const WeightMap& map,
                   const std::string& dtype, io::NewFile& file);

}  // namespace sluice
