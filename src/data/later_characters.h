#pragma once
// Classes of characters. Hugging Face's tokenizers (0.23) cuts text by Unicode 16.0, PCRE2 10.42 by 14.0:
// what 15.0 to 16.0 added to each; where PCRE2 is newer this adds nothing. Categories that characters have
// left since (C, Cn, Mn) have no row. scripts/check_tokenizers compares each with that library, on every
// character.
#include <array>
#include <string_view>

namespace sluice {

struct CharacterClass {
  std::string_view name;
  std::string_view members;  // in PCRE2's tables, as parts of a class in brackets
  std::string_view later;    // what belongs to it since
};

/// Categories, scripts (without those that a character is merely used with, which PCRE2 counts to \p{Han}),
/// and what \w is.
constexpr std::array<CharacterClass, 58> kCharacterClasses = {{
    {"L", R"(\p{L})",
     R"(\x{1c89}-\x{1c8a}\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc}\x{105c0}-\x{105f3})"
     R"(\x{10d4a}-\x{10d65}\x{10d6f}-\x{10d85}\x{10ec2}-\x{10ec4}\x{1123f}-\x{11240})"
     R"(\x{11380}-\x{11389}\x{1138b}\x{1138e}\x{11390}-\x{113b5}\x{113b7}\x{113d1})"
     R"(\x{113d3}\x{11bc0}-\x{11be0}\x{11f02}\x{11f04}-\x{11f10}\x{11f12}-\x{11f33})"
     R"(\x{1342f}\x{13441}-\x{13446}\x{13460}-\x{143fa}\x{16100}-\x{1611d})"
     R"(\x{16d40}-\x{16d6c}\x{18cff}\x{1b132}\x{1b155}\x{1df25}-\x{1df2a})"
     R"(\x{1e030}-\x{1e06d}\x{1e4d0}-\x{1e4eb}\x{1e5d0}-\x{1e5ed}\x{1e5f0}\x{2b739})"
     R"(\x{2ebf0}-\x{2ee5d}\x{31350}-\x{323af})"},
    {"Lu", R"(\p{Lu})", R"(\x{1c89}\x{a7cb}-\x{a7cc}\x{a7da}\x{a7dc}\x{10d50}-\x{10d65})"},
    {"Ll", R"(\p{Ll})", R"(\x{1c8a}\x{a7cd}\x{a7db}\x{10d70}-\x{10d85}\x{1df25}-\x{1df2a})"},
    {"Lt", R"(\p{Lt})", ""},
    {"Lm", R"(\p{Lm})",
     R"(\x{10d4e}\x{10d6f}\x{16d40}-\x{16d42}\x{16d6b}-\x{16d6c}\x{1e030}-\x{1e06d})"
     R"(\x{1e4eb})"},
    {"Lo", R"(\p{Lo})",
     R"(\x{105c0}-\x{105f3}\x{10d4a}-\x{10d4d}\x{10d4f}\x{10ec2}-\x{10ec4})"
     R"(\x{1123f}-\x{11240}\x{11380}-\x{11389}\x{1138b}\x{1138e}\x{11390}-\x{113b5})"
     R"(\x{113b7}\x{113d1}\x{113d3}\x{11bc0}-\x{11be0}\x{11f02}\x{11f04}-\x{11f10})"
     R"(\x{11f12}-\x{11f33}\x{1342f}\x{13441}-\x{13446}\x{13460}-\x{143fa})"
     R"(\x{16100}-\x{1611d}\x{16d43}-\x{16d6a}\x{18cff}\x{1b132}\x{1b155})"
     R"(\x{1e4d0}-\x{1e4ea}\x{1e5d0}-\x{1e5ed}\x{1e5f0}\x{2b739}\x{2ebf0}-\x{2ee5d})"
     R"(\x{31350}-\x{323af})"},
    {"M", R"(\p{M})",
     R"(\x{897}\x{cf3}\x{ece}\x{10d69}-\x{10d6d}\x{10efc}-\x{10eff}\x{11241})"
     R"(\x{113b8}-\x{113c0}\x{113c2}\x{113c5}\x{113c7}-\x{113ca}\x{113cc}-\x{113d0})"
     R"(\x{113d2}\x{113e1}-\x{113e2}\x{11f00}-\x{11f01}\x{11f03}\x{11f34}-\x{11f3a})"
     R"(\x{11f3e}-\x{11f42}\x{11f5a}\x{13440}\x{13447}-\x{13455}\x{1611e}-\x{1612f})"
     R"(\x{1e08f}\x{1e4ec}-\x{1e4ef}\x{1e5ee}-\x{1e5ef})"},
    {"Mc", R"(\p{Mc})",
     R"(\x{cf3}\x{113b8}-\x{113ba}\x{113c2}\x{113c5}\x{113c7}-\x{113ca})"
     R"(\x{113cc}-\x{113cd}\x{113cf}\x{1171e}\x{11f03}\x{11f34}-\x{11f35})"
     R"(\x{11f3e}-\x{11f3f}\x{11f41}\x{1612a}-\x{1612c})"},
    {"Me", R"(\p{Me})", ""},
    {"N", R"(\p{N})",
     R"(\x{10d40}-\x{10d49}\x{116d0}-\x{116e3}\x{11bf0}-\x{11bf9}\x{11f50}-\x{11f59})"
     R"(\x{16130}-\x{16139}\x{16d70}-\x{16d79}\x{1ccf0}-\x{1ccf9}\x{1d2c0}-\x{1d2d3})"
     R"(\x{1e4f0}-\x{1e4f9}\x{1e5f1}-\x{1e5fa})"},
    {"Nd", R"(\p{Nd})",
     R"(\x{10d40}-\x{10d49}\x{116d0}-\x{116e3}\x{11bf0}-\x{11bf9}\x{11f50}-\x{11f59})"
     R"(\x{16130}-\x{16139}\x{16d70}-\x{16d79}\x{1ccf0}-\x{1ccf9}\x{1e4f0}-\x{1e4f9})"
     R"(\x{1e5f1}-\x{1e5fa})"},
    {"Nl", R"(\p{Nl})", ""},
    {"No", R"(\p{No})", R"(\x{1d2c0}-\x{1d2d3})"},
    {"P", R"(\p{P})",
     R"(\x{1b4e}-\x{1b4f}\x{1b7f}\x{10d6e}\x{113d4}-\x{113d5}\x{113d7}-\x{113d8})"
     R"(\x{11b00}-\x{11b09}\x{11be1}\x{11f43}-\x{11f4f}\x{16d6d}-\x{16d6f}\x{1e5ff})"},
    {"Pc", R"(\p{Pc})", ""},
    {"Pd", R"(\p{Pd})", R"(\x{10d6e})"},
    {"Ps", R"(\p{Ps})", ""},
    {"Pe", R"(\p{Pe})", ""},
    {"Pi", R"(\p{Pi})", ""},
    {"Pf", R"(\p{Pf})", ""},
    {"Po", R"(\p{Po})",
     R"(\x{1b4e}-\x{1b4f}\x{1b7f}\x{113d4}-\x{113d5}\x{113d7}-\x{113d8})"
     R"(\x{11b00}-\x{11b09}\x{11be1}\x{11f43}-\x{11f4f}\x{16d6d}-\x{16d6f}\x{1e5ff})"},
    {"S", R"(\p{S})",
     R"(\x{2427}-\x{2429}\x{2ffc}-\x{2fff}\x{31e4}-\x{31e5}\x{31ef}\x{10d8e}-\x{10d8f})"
     R"(\x{1cc00}-\x{1ccef}\x{1cd00}-\x{1ceb3}\x{1f6dc}\x{1f774}-\x{1f776})"
     R"(\x{1f77b}-\x{1f77f}\x{1f7d9}\x{1f8b2}-\x{1f8bb}\x{1f8c0}-\x{1f8c1})"
     R"(\x{1fa75}-\x{1fa77}\x{1fa87}-\x{1fa89}\x{1fa8f}\x{1faad}-\x{1faaf})"
     R"(\x{1fabb}-\x{1fabf}\x{1fac6}\x{1face}-\x{1facf}\x{1fada}-\x{1fadc}\x{1fadf})"
     R"(\x{1fae8}-\x{1fae9}\x{1faf7}-\x{1faf8}\x{1fbcb}-\x{1fbef})"},
    {"Sm", R"(\p{Sm})", R"(\x{10d8e}-\x{10d8f})"},
    {"Sc", R"(\p{Sc})", ""},
    {"Sk", R"(\p{Sk})", ""},
    {"So", R"(\p{So})",
     R"(\x{2427}-\x{2429}\x{2ffc}-\x{2fff}\x{31e4}-\x{31e5}\x{31ef}\x{1cc00}-\x{1ccef})"
     R"(\x{1cd00}-\x{1ceb3}\x{1f6dc}\x{1f774}-\x{1f776}\x{1f77b}-\x{1f77f}\x{1f7d9})"
     R"(\x{1f8b2}-\x{1f8bb}\x{1f8c0}-\x{1f8c1}\x{1fa75}-\x{1fa77}\x{1fa87}-\x{1fa89})"
     R"(\x{1fa8f}\x{1faad}-\x{1faaf}\x{1fabb}-\x{1fabf}\x{1fac6}\x{1face}-\x{1facf})"
     R"(\x{1fada}-\x{1fadc}\x{1fadf}\x{1fae8}-\x{1fae9}\x{1faf7}-\x{1faf8})"
     R"(\x{1fbcb}-\x{1fbef})"},
    {"Z", R"(\p{Z})", ""},
    {"Zs", R"(\p{Zs})", ""},
    {"Zl", R"(\p{Zl})", ""},
    {"Zp", R"(\p{Zp})", ""},
    {"Cc", R"(\p{Cc})", ""},
    {"Cf", R"(\p{Cf})", R"(\x{13439}-\x{1343f})"},
    {"Co", R"(\p{Co})", ""},
    {"Word", R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})",
     R"(\x{897}\x{cf3}\x{ece}\x{1c89}-\x{1c8a}\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc})"
     R"(\x{105c0}-\x{105f3}\x{10d40}-\x{10d65}\x{10d69}-\x{10d6d}\x{10d6f}-\x{10d85})"
     R"(\x{10ec2}-\x{10ec4}\x{10efc}-\x{10eff}\x{1123f}-\x{11241}\x{11380}-\x{11389})"
     R"(\x{1138b}\x{1138e}\x{11390}-\x{113b5}\x{113b7}-\x{113c0}\x{113c2}\x{113c5})"
     R"(\x{113c7}-\x{113ca}\x{113cc}-\x{113d3}\x{113e1}-\x{113e2}\x{116d0}-\x{116e3})"
     R"(\x{11bc0}-\x{11be0}\x{11bf0}-\x{11bf9}\x{11f00}-\x{11f10}\x{11f12}-\x{11f3a})"
     R"(\x{11f3e}-\x{11f42}\x{11f50}-\x{11f5a}\x{1342f}\x{13440}-\x{13455})"
     R"(\x{13460}-\x{143fa}\x{16100}-\x{16139}\x{16d40}-\x{16d6c}\x{16d70}-\x{16d79})"
     R"(\x{18cff}\x{1b132}\x{1b155}\x{1ccf0}-\x{1ccf9}\x{1df25}-\x{1df2a})"
     R"(\x{1e030}-\x{1e06d}\x{1e08f}\x{1e4d0}-\x{1e4f9}\x{1e5d0}-\x{1e5fa}\x{2b739})"
     R"(\x{2ebf0}-\x{2ee5d}\x{31350}-\x{323af})"},
    {"Han", R"(\p{sc:Han})", R"(\x{2b739}\x{2ebf0}-\x{2ee5d}\x{31350}-\x{323af})"},
    {"Hiragana", R"(\p{sc:Hiragana})", R"(\x{1b132})"},
    {"Katakana", R"(\p{sc:Katakana})", R"(\x{1b155})"},
    {"Hangul", R"(\p{sc:Hangul})", ""},
    {"Bopomofo", R"(\p{sc:Bopomofo})", ""},
    {"Latin", R"(\p{sc:Latin})", R"(\x{a7cb}-\x{a7cd}\x{a7da}-\x{a7dc}\x{1df25}-\x{1df2a})"},
    {"Greek", R"(\p{sc:Greek})", ""},
    {"Cyrillic", R"(\p{sc:Cyrillic})", R"(\x{1c89}-\x{1c8a}\x{1e030}-\x{1e06d}\x{1e08f})"},
    {"Armenian", R"(\p{sc:Armenian})", ""},
    {"Georgian", R"(\p{sc:Georgian})", ""},
    {"Hebrew", R"(\p{sc:Hebrew})", ""},
    {"Arabic", R"(\p{sc:Arabic})", R"(\x{897}\x{10ec2}-\x{10ec4}\x{10efc}-\x{10eff})"},
    {"Devanagari", R"(\p{sc:Devanagari})", R"(\x{11b00}-\x{11b09})"},
    {"Bengali", R"(\p{sc:Bengali})", ""},
    {"Tamil", R"(\p{sc:Tamil})", ""},
    {"Telugu", R"(\p{sc:Telugu})", ""},
    {"Kannada", R"(\p{sc:Kannada})", R"(\x{cf3})"},
    {"Malayalam", R"(\p{sc:Malayalam})", ""},
    {"Thai", R"(\p{sc:Thai})", ""},
    {"Lao", R"(\p{sc:Lao})", R"(\x{ece})"},
    {"Myanmar", R"(\p{sc:Myanmar})", R"(\x{116d0}-\x{116e3})"},
    {"Ethiopic", R"(\p{sc:Ethiopic})", ""},
    {"Khmer", R"(\p{sc:Khmer})", ""},
    {"Tibetan", R"(\p{sc:Tibetan})", ""},
}};

/// \w alone has them, too, which a class with \w in it has not.
constexpr std::string_view kWordsAlone = R"(\x{b2}-\x{b3}\x{b9}\x{bc}-\x{be})";

}  // namespace sluice
