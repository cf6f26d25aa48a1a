//! Compiled kernels on disk: one file for each unit, architecture, compiler and set of flags.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::cuda::nvrtc::FLAGS;
use crate::cuda::units::HEADERS;
use crate::cuda::{Architecture, Compiled, CudaError, Nvrtc, Resources, Unit};

/// First line of a file; another format begins with another line.
const MAGIC: &str = "dspark kernels 1";

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// A cache in `folder`, which is created when it is needed; with `None`, nothing is kept.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Cache { folder }
    }

    /// Takes the unit from the cache, or compiles and stores it; also returns whether it was in the cache.
    ///
    /// A damaged file counts as missing. If the folder cannot be written, the compiled unit is used all the
    /// same.
    pub fn obtain(
        &self,
        nvrtc: &Nvrtc,
        unit: &Unit,
        architecture: Architecture,
    ) -> Result<(Compiled, bool), CudaError> {
        nvrtc.require(architecture)?;
        let path = self.folder.as_ref().map(|folder| folder.join(name(nvrtc, unit, architecture)));
        if let Some(kept) = path.as_deref().and_then(|path| read(&fs::read(path).ok()?)) {
            return Ok((kept, true));
        }
        let compiled = nvrtc.compile(unit, architecture)?;
        if let Some(path) = &path {
            // Kernels that cannot be stored are compiled again the next time: slower, but no reason to fail.
            let _ = store(path, &write(&compiled));
        }
        Ok((compiled, false))
    }
}

/// The file name, which covers everything that the outcome depends on.
fn name(nvrtc: &Nvrtc, unit: &Unit, architecture: Architecture) -> String {
    let mut hash = Sha256::new();
    let headers = HEADERS.iter().flat_map(|header| [header.0, header.1]);
    for part in headers.chain([unit.name, unit.source]).chain(FLAGS.iter().copied()) {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    hash.update(format!("{architecture} {}", nvrtc.version()));
    format!("{}-{architecture}-{}.cubin", unit.name, &hex(&hash.finalize())[..32])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file: the magic line, a digest of all that follows, a line for each entry, an empty line, the cubin.
fn write(compiled: &Compiled) -> Vec<u8> {
    let mut body = Vec::new();
    for Resources { entry, registers, spills, stack, shared } in &compiled.resources {
        body.extend_from_slice(format!("{entry} {registers} {spills} {stack} {shared}\n").as_bytes());
    }
    body.push(b'\n');
    body.extend_from_slice(&compiled.cubin);
    let mut whole = format!("{MAGIC}\n{}\n", hex(&Sha256::digest(&body))).into_bytes();
    whole.extend_from_slice(&body);
    whole
}

/// Reads what `write` wrote; `None` for anything else.
fn read(whole: &[u8]) -> Option<Compiled> {
    let body = whole.strip_prefix(MAGIC.as_bytes())?.strip_prefix(b"\n")?;
    let (digest, body) = body.split_at_checked(64)?;
    let body = body.strip_prefix(b"\n")?;
    if hex(&Sha256::digest(body)).as_bytes() != digest {
        return None;
    }
    let end =
        if body.first() == Some(&b'\n') { 0 } else { body.windows(2).position(|two| two == b"\n\n")? + 1 };
    let (lines, cubin) = body.split_at(end);
    let mut resources = Vec::new();
    for line in std::str::from_utf8(lines).ok()?.lines() {
        let mut words = line.split(' ');
        let entry = words.next()?.to_string();
        let mut number = || words.next()?.parse().ok();
        resources.push(Resources {
            entry,
            registers: number()?,
            spills: number()?,
            stack: number()?,
            shared: number()?,
        });
    }
    Some(Compiled { cubin: cubin.strip_prefix(b"\n")?.to_vec(), resources })
}

/// Stores a file whole or not at all: a reader, or a second writer, never sees half a file.
fn store(path: &Path, whole: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let own = format!(".{}-{}.part", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = folder.join(own);
    let done = fs::File::create(&temporary)
        .and_then(|mut file| file.write_all(whole).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, path));
    if done.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled() -> Compiled {
        let entry =
            |entry: &str| Resources { entry: entry.into(), registers: 40, spills: 0, stack: 8, shared: 512 };
        Compiled { cubin: b"\x7fELF\n\n\0rest".to_vec(), resources: vec![entry("a"), entry("b")] }
    }

    #[test]
    fn what_was_written_is_read() {
        assert_eq!(read(&write(&compiled())), Some(compiled()));
        let bare = Compiled { resources: Vec::new(), ..compiled() };
        assert_eq!(read(&write(&bare)), Some(bare));
    }

    #[test]
    fn any_damage_is_seen() {
        let whole = write(&compiled());
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 0x10;
            assert_eq!(read(&damaged), None, "byte {place}");
            assert_eq!(read(&whole[..place]), None, "cut at {place}");
        }
    }
}
