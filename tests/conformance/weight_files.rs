//! Weights files: their sources, and damaged or malicious ones.

use std::{collections::HashMap, fs};

use encoder::{EncoderForSequenceClassification, LoadOptions, ModelFiles};
use serde_json::{Value, json};

use super::{CONFIG, Checkpoint, LogitsFn, QUERY_WEIGHT, Table, WEIGHTS, check_encoder};
use crate::support::golden;

const INDEX: &str = "model.safetensors.index.json";
const PYTORCH: &str = "pytorch_model.bin";

pub(super) fn sources(t: &mut Table) {
    t.section("weight sources");
    t.case("a model folder", |c| check_encoder(&ModelFiles::dir(c.write_folder().path())?));
    t.case("a weights file of any name, config beside it", |c| {
        let dir = c.write_folder();
        let file = dir.path().join("weights.v2.safetensors");
        fs::rename(dir.path().join(WEIGHTS), &file)?;
        check_encoder(&ModelFiles::file(file)?)
    });
    t.case("two shards with an index", |c| {
        shard(c);
        c.check_encoder()
    });
    t.case("an index file of any name", |c| {
        shard(c);
        let index = c.files.remove(INDEX).unwrap();
        let dir = c.set_file("fp32.index.json", index).write_folder();
        check_encoder(&ModelFiles::file(dir.path().join("fp32.index.json"))?)
    });
    let fixture = |name| fs::read(golden(&format!("pickled/{name}"))).unwrap();
    let logits: LogitsFn = |files, ids, types, mask| {
        let (model, _) =
            EncoderForSequenceClassification::from_files(files, &LoadOptions::default())?;
        Ok(model.forward(ids, Some(types), mask)?)
    };
    for (case, file) in [
        ("pytorch_model.bin", "archive.bin"),
        ("pytorch_model.bin saved before PyTorch 1.6", "early.bin"),
    ] {
        t.head_case("sequence", case, |c| {
            c.remove_file(WEIGHTS).set_file(PYTORCH, fixture(file));
            c.check_logits("heads/sequence", logits)
        });
    }
    t.head_case("sequence", "one shard listed in pytorch_model.bin.index.json", |c| {
        let names = c.tensors.keys().map(|name| (name.clone(), json!("part.bin")));
        let index = json!({"weight_map": names.collect::<serde_json::Map<_, _>>()});
        c.remove_file(WEIGHTS).set_file("part.bin", fixture("archive.bin"));
        c.set_file("pytorch_model.bin.index.json", index.to_string());
        c.check_logits("heads/sequence", logits)
    });
    t.case("model.safetensors preferred to pytorch_model.bin", |c| {
        c.set_file(PYTORCH, "x").check_encoder()
    });
    t.case("pytorch_model.bin not written by PyTorch", |c| {
        let bytes = c.contents()[WEIGHTS].clone();
        c.remove_file(WEIGHTS).set_file(PYTORCH, bytes).check_encoder()
    });
    t.case("no weights file", |c| c.remove_file(WEIGHTS).check_encoder());
    t.case("no config.json", |c| c.remove_file(CONFIG).check_encoder());
    t.case("a folder that does not exist", |_| check_encoder(&ModelFiles::dir("no/folder")?));
    t.case("a file that does not exist", |_| {
        check_encoder(&ModelFiles::file("no/file.safetensors")?)
    });
    #[cfg(feature = "hub")]
    hub_sources(t);
}

/// Replaces `model.safetensors` by two shards and an index.
pub(super) fn shard(c: &mut Checkpoint) {
    let mut map = serde_json::Map::new();
    let (mut a, mut b) = (HashMap::new(), HashMap::new());
    for (i, (name, tensor)) in c.tensors.iter().enumerate() {
        let (shard, file) = if i % 2 == 0 { (&mut a, "a.st") } else { (&mut b, "b.st") };
        shard.insert(name.clone(), tensor.clone());
        map.insert(name.clone(), file.into());
    }
    for (name, shard) in [("a.st", a), ("b.st", b)] {
        c.set_file(name, safetensors::serialize(&shard, None).unwrap());
    }
    c.remove_file(WEIGHTS).set_file(INDEX, json!({"weight_map": map}).to_string());
}

#[cfg(feature = "hub")]
fn hub_sources(t: &mut Table) {
    use encoder::Hub;

    let commit = "0123456789abcdef0123456789abcdef01234567";
    let cached = |c: &Checkpoint, revision: &str| {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--org--name");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::create_dir_all(model.join("snapshots")).unwrap();
        fs::write(model.join("refs").join(revision), commit).unwrap();
        fs::rename(c.write_folder().keep(), model.join("snapshots").join(commit)).unwrap();
        cache
    };
    for (case, revision, id) in [
        ("org/name in the cache", "main", "org/name".to_string()),
        ("org/name@branch in the cache", "dev", "org/name@dev".to_string()),
        ("org/name@commit in the cache", "main", format!("org/name@{commit}")),
    ] {
        t.case(case, |c| {
            let cache = cached(c, revision);
            check_encoder(&Hub::new(cache.path()).offline(true).model(&id)?)
        });
    }
    t.case("offline, and the model is not cached", |_| {
        check_encoder(&Hub::new("c").offline(true).model("a/b")?)
    });
    for (case, name) in [
        ("hub: download without faults", "none"),
        ("hub: connection closed early, download resumed", "cut"),
        ("hub: file with a changed byte", "changed"),
        ("hub: file one byte too long", "longer"),
        ("hub: status 401, model not found", "401"),
        ("hub: status 403, access restricted", "403"),
        ("hub: status 404, revision not found", "no revision"),
        ("hub: status 503 for every attempt", "503"),
    ] {
        t.case(case, |_| Ok(crate::hub::outcome(name)));
    }
    t.case("an invalid model name", |_| check_encoder(&Hub::new("c").model("a/../b")?));
}

pub(super) fn damaged(t: &mut Table) {
    t.section("damaged and malicious files");
    safetensors_headers(t);
    indices(t);
    pickles(t);
}

fn safetensors_headers(t: &mut Table) {
    let tensor = |shape: &str, from: u64, to: u64| {
        format!(r#"{{"dtype": "F32", "shape": {shape}, "data_offsets": [{from}, {to}]}}"#)
    };
    t.case("a header longer than the file", |c| {
        c.set_file(WEIGHTS, [&1000u64.to_le_bytes()[..], b"{}"].concat()).check_encoder()
    });
    t.case("a header of 2^64 - 1 bytes", |c| {
        c.set_file(WEIGHTS, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).check_encoder()
    });
    t.case("an empty file", |c| c.set_file(WEIGHTS, "").check_encoder());
    t.case("a header that is not UTF-8", |c| {
        c.set_file(WEIGHTS, [&2u64.to_le_bytes()[..], b"\xff\xff"].concat()).check_encoder()
    });
    t.case("a header that is not JSON", |c| c.check_header("{", 0));
    t.case("overlapping tensors", |c| {
        c.check_header(
            &format!(r#"{{"x": {}, "y": {}}}"#, tensor("[4]", 0, 16), tensor("[4]", 8, 24)),
            24,
        )
    });
    t.case("a gap before the first tensor", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[4]", 4, 20)), 20)
    });
    t.case("a shape whose size overflows", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[4294967296, 4294967296]", 0, 16)), 16)
    });
    t.case("a shape that does not match its byte range", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[5]", 0, 16)), 16)
    });
    t.case("a byte range beyond the end of the file", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[4]", 0, 16)), 12)
    });
    t.case("data after the last tensor", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[4]", 0, 16)), 20)
    });
    t.case("a duplicate tensor name", |c| {
        c.check_header(
            &format!(r#"{{"x": {}, "x": {}}}"#, tensor("[4]", 0, 16), tensor("[4]", 16, 32)),
            32,
        )
    });
    t.case("an unknown dtype", |c| {
        c.check_header(&format!(r#"{{"x": {}}}"#, tensor("[4]", 0, 16).replace("F32", "F33")), 16)
    });
    t.case("a Git LFS pointer", |c| {
        c.set_file(
            WEIGHTS,
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n",
        )
        .check_encoder()
    });
}

fn indices(t: &mut Table) {
    let index = |c: &mut Checkpoint, map: Value| {
        let shard = c.contents()[WEIGHTS].clone();
        c.remove_file(WEIGHTS).set_file("a.st", shard.clone()).set_file("b.st", shard);
        c.set_file(INDEX, json!({"weight_map": map}).to_string()).check_encoder()
    };
    for name in ["../a.st", "/etc/passwd", "..", "", "x/y", "x\\y", "C:x"] {
        t.case(&format!("an index with shard name {name:?}"), |c| index(c, json!({"x": name})));
    }
    t.case("an index with a missing shard", |c| index(c, json!({"x": "c.st"})));
    t.case("an index with a tensor missing from its shard", |c| index(c, json!({"x": "a.st"})));
    t.case("two shards with the same tensors", |c| {
        index(c, json!({QUERY_WEIGHT: "a.st", "x": "b.st"}))
    });
    t.case("an index that is not a JSON object", |c| {
        c.remove_file(WEIGHTS).set_file(INDEX, "[]").check_encoder()
    });
}

fn pickles(t: &mut Table) {
    // torch.save before PyTorch 1.6 writes three pickles (magic number, version, system
    // information), then the pickle of the tensors, here `program`.
    let pickle = |c: &mut Checkpoint, program: &[u8]| {
        let preamble = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";
        c.remove_file(WEIGHTS).set_file(PYTORCH, [preamble, program].concat()).check_encoder()
    };
    t.case("a pickle that calls os.system", |c| {
        pickle(c, b"\x80\x02}X\x01\0\0\0xcos\nsystem\nX\x04\0\0\0true\x85Rs.")
    });
    t.case("a truncated pickle", |c| pickle(c, b"\x80\x02}X\xff\xff\xff\xffx"));
    t.case("a deeply nested pickle", |c| {
        pickle(c, &[&b"\x80\x02N"[..], &[0x85; 1_000_000], b"."].concat())
    });
    t.case("a pickle of tensors with 100,000 dimensions", |c| {
        let key = |i: u32| [&b"X\x05\0\0\0"[..], format!("{i:05}").as_bytes()].concat();
        let storage =
            b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ";
        let sizes = [&b"]q\x01("[..], &b"K\x01".repeat(100_000), b"eh\x01"].concat();
        let first = b"ctorch._utils\n_rebuild_tensor_v2\n(";
        let first = [&key(0)[..], first, storage, b"K\0", &sizes, b"\x89NtRq\0"].concat();
        let others = (1..20_000).flat_map(|i| [&key(i)[..], b"h\0"].concat()).collect::<Vec<_>>();
        pickle(c, &[b"\x80\x02}(", &first[..], &others, b"u."].concat())
    });
    t.case("a pickle of dictionary keys that are long lists", |c| {
        let list = [&b"\x80\x02}(X\x01\0\0\0a]q\0("[..], &b"N".repeat(1_000_000), b"e"].concat();
        pickle(c, &[&list[..], &b"h\0N".repeat(300_000), b"u."].concat())
    });
    t.case("a pickle that copies a list 1,000,000 times", |c| {
        let pairs = [&b"]q\x01("[..], &b"NN\x86".repeat(100_000), b"e"].concat();
        let copy = b"h\x02h\x01\x85R";
        let class = b"ccollections\nOrderedDict\nq\x02";
        pickle(c, &[b"\x80\x02", &pairs[..], class, &copy.repeat(1_000_000), b"."].concat())
    });
    t.case("100,000 tensors of one storage with a long key", |c| {
        let key = |i: u32| [&b"X\x05\0\0\0"[..], format!("{i:05}").as_bytes()].concat();
        let storage = [
            &b"(X\x07\0\0\0storagectorch\nFloatStorage\nX"[..],
            &1_000_000u32.to_le_bytes(),
            &b"k".repeat(1_000_000),
            b"X\x03\0\0\0cpuK\x01tQ",
        ];
        let call = &b"ctorch._utils\n_rebuild_tensor_v2\n("[..];
        let first = [&key(0), call, &storage.concat(), b"K\0))\x89NtRq\0"].concat();
        let others = (1..100_000).flat_map(|i| [&key(i)[..], b"h\0"].concat());
        let others = others.collect::<Vec<_>>();
        pickle(c, &[b"\x80\x02}(", &first[..], &others, b"u.\x80\x02]."].concat())
    });
    t.case("a pickle of exponential size", |c| {
        let double = b"q\x00h\x00\x86"; // replaces x by (x, x)
        pickle(c, &[&b"\x80\x02N"[..], &double.repeat(100), b"."].concat())
    });
    t.case("a truncated Zip archive", |c| {
        let bytes = fs::read(golden("pickled/archive.bin"))?;
        c.remove_file(WEIGHTS).set_file(PYTORCH, &bytes[..bytes.len() / 2]).check_encoder()
    });
    t.case("an empty Zip archive", |c| {
        c.remove_file(WEIGHTS)
            .set_file(PYTORCH, b"PK\x05\x06".iter().chain(&[0; 18]).copied().collect::<Vec<_>>())
            .check_encoder()
    });
}
