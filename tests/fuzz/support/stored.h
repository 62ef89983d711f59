#pragma once
// Folders of weights and checkpoints from readable inputs. A file NAME.safetensors whose content begins with
// { is a header: its length goes before it and data behind it. Where a manifest or a header says "*", the
// right size, offset or checksum is put in after the mutation, so that what is behind the checks is tested;
// any other value stays as it is.
#include <cstdint>
#include <string>

#include "support/fuzz.h"

namespace sluice::fuzz {

/// The bytes of a safetensors file from its header. "data_offsets": "*" continues where the tensor before it
/// ends. Data are a pattern of bytes that holds neither infinities nor NaN in f32 and bf16.
std::string safetensors_of(const std::string& header);
/// All files complete, the manifest signed.
Files completed(Files files);
/// Writes them to FOLDER.
void write_all(const Files& files, const std::string& folder);

}  // namespace sluice::fuzz
