//! The `encodle` command: output, errors and exit codes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Command, Stdio},
};

use assert_cmd::{assert::Assert, cargo::cargo_bin_cmd};
use candle_core::Device;
use encoder::{Embedder, LoadOptions};

use crate::support::{MINILM, golden, golden_copy};

/// Selects the CPU, with which the tests compute the expected vectors, and turns off the cache of
/// packed weights.
pub const ENVIRONMENT: [(&str, &str); 2] =
    [("ENCODLE_DEVICE", "cpu"), ("ENCODLE_PACKED_CACHE", "off")];

pub fn encodle(arguments: &[&str], stdin: &[u8]) -> Assert {
    cargo_bin_cmd!("encodle").envs(ENVIRONMENT).args(arguments).write_stdin(stdin).assert()
}

pub fn stdout(assert: Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// Standard error, which must be one line.
pub fn stderr(assert: Assert) -> String {
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().to_string()
}

#[test]
fn embed_table_shows_dimensions_values_and_cosines() {
    let texts =
        ["A man is eating food.", "A man is eating a piece of bread.", "The new movie is awesome."];
    let arguments = [&["embed", "--format", "table"], &texts[..]].concat();
    let table = stdout(encodle(&arguments, b"").success());
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "3 texts, 384 dimensions");
    assert!(lines[2].ends_with("cos 1   cos 2   cos 3"), "{table}");
    assert!(lines[3].starts_with("    1  A man is eating food."), "{table}");
    assert!(lines[3].ends_with("1.000   0.755  -0.046"), "{table}");
    assert_eq!(lines[2].len(), lines[3].len(), "{table}");
    assert_eq!(lines.len(), 6, "{table}");
}

#[test]
fn a_sparse_model_prints_words_and_refuses_options_of_dense_models() {
    let model = "tests/golden/sparse/splade_limited";
    let table = stdout(encodle(&["embed", "--model", model, "--format", "table", "a"], b""));
    assert!(table.starts_with("1 text, 96 dimensions\n"), "{table}");
    let arguments = ["embed", "--model", model, "--max-active-dims", "2", "--tokens", "a"];
    let line: serde_json::Value = serde_json::from_str(&stdout(encodle(&arguments, b""))).unwrap();
    assert_eq!(line["embedding"]["tokens"].as_array().map(Vec::len), Some(2), "{line}");
    assert_eq!(line["embedding"]["indices"].as_array().map(Vec::len), Some(2), "{line}");
    for (option, kind, model) in [
        (&["--dimensions", "3"][..], "sparse", model),
        (&["--normalize"], "sparse", model),
        (&["--tokens"], "dense", MINILM),
    ] {
        let arguments = [&["embed", "--model", model, "a"], option].concat();
        let error = stderr(encodle(&arguments, b"").code(2));
        assert!(
            error.contains(&format!("{} has no effect on a {kind} model", option[0])),
            "{error}"
        );
    }
    let arguments = ["embed", "--model", model, "a", "--output", "target/sparse.npy"];
    let error = stderr(encodle(&arguments, b"").failure());
    assert!(error.contains("rows of this model differ in length"), "{error}");
    let error = stderr(encodle(&["embed", "--kind", "sparse", "a"], b"").failure());
    assert!(error.contains("Transformer, Pooling, Normalize is not supported"), "{error}");
}

#[test]
fn a_multi_vector_model_prints_a_vector_per_token_and_refuses_npy() -> anyhow::Result<()> {
    let model = "tests/golden/multi_vector/expansion"; // queries of 12 tokens
    let arguments = ["embed", "--model", model, "--format", "table", "the cat", "a dog"];
    let table = stdout(encodle(&arguments, b"").success());
    assert!(table.starts_with("2 texts, 8 dimensions\n"), "{table}");
    let arguments = ["embed", "--model", model, "--prompt-name", "query", "the cat"];
    let line: serde_json::Value = serde_json::from_str(&stdout(encodle(&arguments, b"")))?;
    let vectors: Vec<Vec<f32>> = serde_json::from_value(line["embedding"].clone())?;
    assert_eq!(vectors.iter().map(Vec::len).collect::<Vec<_>>(), [8; 12]);
    let arguments = ["embed", "--model", model, "a", "--output", "target/multi.npy"];
    let error = stderr(encodle(&arguments, b"").failure());
    assert!(error.contains("rows of this model differ in length"), "{error}");
    let error =
        stderr(encodle(&["embed", "--model", model, "a", "--dimensions", "3"], b"").code(2));
    assert!(error.contains("--dimensions has no effect on a multi model"), "{error}");
    let error = stderr(encodle(&["embed", "--kind", "multi", "a"], b"").failure());
    assert!(error.contains("Transformer, Pooling, Normalize is not supported"), "{error}");
    Ok(())
}

#[test]
fn a_model_of_all_kinds_prints_three_embeddings_and_other_models_are_refused() -> anyhow::Result<()>
{
    let all = ["embed", "--model", "tests/golden/bge_m3", "--kind", "all"];
    let embed = |more: &[&str]| encodle(&[&all[..], more].concat(), b"");
    let line = stdout(embed(&["--dimensions", "3", "--tokens", "a cat"]).success());
    let line: serde_json::Value = serde_json::from_str(&line)?;
    let names: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["text", "embedding", "sparse_embedding", "multi_vector_embedding"]);
    assert_eq!(line["embedding"].as_array().map(Vec::len), Some(3));
    assert_eq!(line["multi_vector_embedding"][0].as_array().map(Vec::len), Some(16));
    assert!(line["sparse_embedding"]["tokens"][0].is_string(), "{line}");
    let table = stdout(embed(&["--format", "table", "a cat"]).success());
    for part in ["dense:\n1 text, 16", "\nsparse:\n1 text, 338", "\nmulti:\n1 text, 16"] {
        assert!(table.contains(part), "{table}");
    }
    let error = stderr(embed(&["--normalize", "a"]).code(2));
    assert!(error.contains("--normalize has no effect on a model of all kinds"), "{error}");
    let error = stderr(encodle(&["embed", "--kind", "all", "a"], b"").code(1));
    assert!(error.contains("expected a folder of BGE-M3, with sparse_linear.pt and"), "{error}");
    Ok(())
}

#[test]
fn json_lines_have_the_exact_vectors_of_the_library() -> anyhow::Result<()> {
    let output =
        stdout(encodle(&["embed", "--model", MINILM], b"I love AI\r\n\n\"quoted\"").success());
    let texts = ["I love AI", "", "\"quoted\""];
    let expected: Vec<Vec<f32>> =
        Embedder::from_dir(MINILM, &LoadOptions::default())?.embed(&texts)?.to_vec2()?;
    assert_eq!(output.lines().count(), 3);
    for ((line, text), expected) in output.lines().zip(texts).zip(expected) {
        assert!(line.starts_with("{\"text\":"), "{line}");
        let line: serde_json::Value = serde_json::from_str(line)?;
        let embedding: Vec<f32> = serde_json::from_value(line["embedding"].clone())?;
        assert_eq!((line["text"].as_str(), embedding), (Some(text), expected));
    }
    Ok(())
}

/// The vectors of a smaller dtype are similar to those of f32, but not equal.
#[test]
fn dtype_is_applied_and_zero_threads_are_refused() -> anyhow::Result<()> {
    let embed = |dtype: &str| -> anyhow::Result<Vec<f32>> {
        let arguments = ["embed", "--dtype", dtype, "--threads", "1", "I love AI"];
        let line: serde_json::Value =
            serde_json::from_str(&stdout(encodle(&arguments, b"").success()))?;
        Ok(serde_json::from_value(line["embedding"].clone())?)
    };
    let exact = embed("f32")?;
    for (dtype, least) in [("bf16", 0.9999), ("int8", 0.998)] {
        let got = embed(dtype)?;
        let cosine: f32 = got.iter().zip(&exact).map(|(x, y)| x * y).sum();
        assert!(cosine > least && cosine < 1.0 && got != exact, "{dtype}: {cosine}");
    }
    assert_eq!(
        stderr(encodle(&["embed", "--threads", "0", "a"], b"").code(2)),
        "encodle: invalid value '0' for '--threads <N>': expected a whole number of at least 1; \
         see encodle embed --help"
    );
    Ok(())
}

/// Without a GPU, `--device cuda` is an error, and `auto`, the default, uses the CPU.
#[test]
fn device_is_applied() -> anyhow::Result<()> {
    let on_cpu = vector(&["--device", "cpu", "a"])?;
    let mut plain = cargo_bin_cmd!("encodle");
    let plain = plain
        .envs(ENVIRONMENT)
        .env_remove("ENCODLE_DEVICE")
        .args(["embed", "a"])
        .assert()
        .success();
    let message = String::from_utf8_lossy(&plain.get_output().stderr).into_owned();
    if cfg!(feature = "cuda") {
        assert!(message.contains("using cuda:0") || message.contains("using the CPU"))
    } else {
        assert!(message.is_empty(), "without CUDA, auto prints nothing: {message}")
    }
    if Device::new_cuda(0).is_err() {
        let line: serde_json::Value = serde_json::from_str(&stdout(plain))?;
        assert_eq!(serde_json::from_value::<Vec<f32>>(line["embedding"].clone())?, on_cpu);
        assert_eq!(vector(&["--device", "auto", "a"])?, on_cpu);
        let error = stderr(encodle(&["embed", "--device", "cuda", "a"], b"").code(1));
        assert!(error.contains("expected"), "{error}");
    }
    #[cfg(not(feature = "cuda"))]
    assert_eq!(
        stderr(encodle(&["embed", "--device", "cuda:1", "a"], b"").code(1)),
        "encodle: this binary was built without CUDA support: expected --device cpu or auto; \
         rebuild it with --features cuda to use a GPU"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--device", "gpu", "a"], b"").code(2)),
        "encodle: invalid value 'gpu' for '--device <DEVICE>': expected cpu, cuda, cuda:N or auto; \
         see encodle embed --help"
    );
    Ok(())
}

fn vector(arguments: &[&str]) -> anyhow::Result<Vec<f32>> {
    let line = stdout(encodle(&[&["embed"], arguments].concat(), b"").success());
    let line: serde_json::Value = serde_json::from_str(&line)?;
    Ok(serde_json::from_value(line["embedding"].clone())?)
}

#[test]
fn prompts_pooling_and_dimensions_are_applied() -> anyhow::Result<()> {
    let plain = vector(&["ask: why"])?;
    assert_eq!(vector(&["--prompt", "ask: ", "why"])?, plain);
    // Without prompts in the model's files, the prompt `query` is empty.
    assert_eq!(vector(&["--prompt-name", "query", "ask: why"])?, plain);
    let truncated = vector(&["--dimensions", "5", "ask: why"])?;
    let length = plain[..5].iter().map(|x| x * x).sum::<f32>().sqrt();
    assert_eq!(truncated.len(), 5);
    for (truncated, plain) in truncated.iter().zip(&plain) {
        assert!((truncated - plain / length).abs() < 1e-6, "{truncated} {plain}");
    }
    let pooled = vector(&["--model", MINILM, "--pooling", "mean", "--normalize", "ask: why"])?;
    assert_eq!(pooled, plain);
    assert_eq!(vector(&["--model", MINILM, "--pooling", "cls,max", "why"])?.len(), 768);
    assert_eq!(
        stderr(encodle(&["embed", "--prompt-name", "topic", "why"], b"").code(1)),
        "encodle: prompt \"topic\" is unknown: expected none, since the model has no prompts; \
         pass the prompt's text instead"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--dimensions", "385", "why"], b"").code(1)),
        "encodle: embeddings cannot be truncated to dimension 385: expected 1 to 384 (the \
         dimension of the model's embeddings)"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--model", MINILM, "--pooling", "median", "why"], b"").code(2)),
        "encodle: invalid value 'median' for '--pooling <MODE>': pooling mode \"median\" is unknown: \
         expected one of cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken; \
         see encodle embed --help"
    );
    Ok(())
}

#[test]
fn long_texts_are_truncated_refused_or_split() {
    let long = "and ".repeat(300);
    assert_eq!(
        stderr(encodle(&["embed", "short", &long, &long], b"").success()),
        "encodle: 2 texts truncated to 256 tokens; --long-texts windows embeds all tokens"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--long-texts", "refuse", &long], b"").code(1)),
        "encodle: the list of texts, item 1: text \"and and and and and and and and and and \" has \
         302 tokens: expected at most 256; shorten it, or enable truncation or splitting into \
         windows"
    );
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("vectors.npy");
    let refuse = ["embed", "--long-texts", "refuse"];
    let input = format!("short\n{long}\nlast\n");
    let refused = encodle(&refuse, input.as_bytes()).code(1);
    assert!(stdout(refused).starts_with("{\"text\":\"short\",\"embedding\":["));
    let npy = ["--output", output.to_str().expect("UTF-8")];
    for output in [&[][..], &["--format", "table"], &npy] {
        let error = stderr(encodle(&[&refuse[..], output].concat(), input.as_bytes()).code(1));
        assert!(error.starts_with("encodle: standard input, line 2: text \"and and"), "{error}");
    }
    let windows = encodle(&["embed", "--long-texts", "windows", &long], b"").success();
    assert!(windows.get_output().stderr.is_empty());
}

#[test]
fn every_command_that_truncates_warns() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let corpus = dir.path().join("corpus.npy");
    let corpus = corpus.to_str().expect("UTF-8");
    encodle(&["embed", "--output", corpus, "a cab"], b"").success();
    let head = |name: &str| golden(&format!("heads/{name}")).to_str().unwrap().to_string();
    let (sequence, score, masked) = (head("sequence"), head("score"), head("masked_lm"));
    let (long, longer) = ("dead beef ".repeat(30), "and ".repeat(300));
    let masked_text = format!("[MASK] {long}");
    for arguments in [
        &["similarity", "a", &longer][..],
        &["compare", "a", &longer],
        &["search", "--corpus", corpus, &longer],
        &["classify", "--model", &sequence, &long],
        &["rerank", "--model", &score, "--query", "bad", &long],
        &["fill-mask", "--model", &masked, &masked_text],
    ] {
        let warning = stderr(encodle(arguments, b"").success());
        assert!(
            warning.starts_with("encodle: 1 ")
                && warning.contains(" truncated to ")
                && warning.ends_with(" tokens"),
            "{arguments:?}: {warning}"
        );
    }
    let warning = stderr(encodle(&["attention", &longer], b"").success());
    assert_eq!(warning, "encodle: 1 text truncated to 256 tokens");
    let warning = stderr(encodle(&["attention", &longer, "--pair", "a"], b"").success());
    assert_eq!(warning, "encodle: 1 pair of texts truncated to 256 tokens");
    // `tag` and `answer` split long texts into windows and truncate nothing.
    for arguments in [
        &["tag", "--model", &head("tagger"), &long][..],
        &["answer", "--model", &head("answer"), "--question", "bad", &long],
    ] {
        assert!(encodle(arguments, b"").success().get_output().stderr.is_empty(), "{arguments:?}");
    }
    Ok(())
}

#[test]
fn a_mask_that_truncation_removes_is_an_error() {
    let model = golden("heads/masked_lm").to_str().unwrap().to_string();
    let error = |text: &str| stderr(encodle(&["fill-mask", "--model", &model, text], b"").code(1));
    let long = "b ".repeat(60);
    let removed = error(&format!("a [MASK] {long}[MASK]"));
    assert!(removed.contains("truncation would remove 1 of its mask tokens"), "{removed}");
    assert!(error(&format!("{long}[MASK] [MASK]")).contains("would remove 2 of its mask tokens"));
    let input = format!("\n[MASK]\n{long}\n");
    let no_mask = stderr(encodle(&["fill-mask", "--model", &model], input.as_bytes()).code(1));
    assert!(
        no_mask.starts_with("encodle: standard input, line 1: text \"\" has no mask"),
        "{no_mask}"
    );
}

#[test]
fn a_question_that_is_too_long_is_an_error() {
    let model = golden("heads/answer").to_str().unwrap().to_string();
    let question = "bad ".repeat(400);
    let arguments = ["answer", "--model", &model, "--question", &question, "a cab"];
    let error = stderr(encodle(&arguments, b"").code(1));
    assert!(
        error.starts_with("encodle: question \"bad bad")
            && error.ends_with(" has 1200 tokens: expected at most 28; shorten it"),
        "{error}"
    );
}

#[test]
fn threads_are_limited_to_4_per_cpu() {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let warning = stderr(encodle(&["embed", "--threads", "70000", "a"], b"").success());
    let expected =
        format!("encodle: using {} threads instead of 70000: the maximum is 4 per CPU", 4 * cpus);
    assert_eq!(warning, expected);
    let mut command = cargo_bin_cmd!("encodle");
    let by_variable =
        command.envs(ENVIRONMENT).env("RAYON_NUM_THREADS", "70000").args(["embed", "a"]);
    assert_eq!(stderr(by_variable.assert().success()), expected);
    let most = (4 * cpus).to_string();
    let within = encodle(&["embed", "--threads", &most, "a"], b"").success();
    assert!(within.get_output().stderr.is_empty());
}

#[test]
fn cosines_of_a_model_trained_for_another_similarity_print_a_warning() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    for entry in walk(MINILM)? {
        let to = dir.path().join(entry.strip_prefix(MINILM)?);
        std::fs::create_dir_all(to.parent().expect("a folder"))?;
        std::fs::copy(&entry, to)?;
    }
    let settings = dir.path().join("config_sentence_transformers.json");
    let model = dir.path().to_str().expect("UTF-8");
    for (name, expected) in [
        ("dot", "is \"dot\"; cosines are printed"),
        (
            "maxsim",
            "\"maxsim\" is unknown: expected cosine, dot, euclidean or manhattan; cosines are \
             printed",
        ),
    ] {
        std::fs::write(&settings, format!(r#"{{"similarity_fn_name": "{name}"}}"#))?;
        let warning = stderr(encodle(&["similarity", "--model", model, "a", "b"], b"").success());
        assert_eq!(warning, format!("encodle: the model's similarity_fn_name {expected}"));
        let embedder = Embedder::from_dir(model, &LoadOptions::default())?;
        assert_eq!(embedder.similarity_fn_name(), if name == "dot" { name } else { "cosine" });
    }
    let quiet = encodle(&["embed", "--model", model, "a"], b"").success();
    assert!(quiet.get_output().stderr.is_empty(), "vectors do not depend on the similarity");
    Ok(())
}

/// All files in a folder and its subfolders.
fn walk(folder: impl AsRef<std::path::Path>) -> anyhow::Result<Vec<std::path::PathBuf>> {
    let mut files = vec![];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { files.extend(walk(path)?) } else { files.push(path) }
    }
    Ok(files)
}

#[test]
fn cross_encoder_prompts_are_put_before_the_query() -> anyhow::Result<()> {
    let dir = golden_copy("heads/score", &["config.json", "model.safetensors", "vocab.txt"])?;
    let write = |file: &str, json: &str| std::fs::write(dir.path().join(file), json);
    let class = "sentence_transformers.base.modules.transformer.Transformer";
    write("modules.json", &format!(r#"[{{"type": "{class}", "path": ""}}]"#))?;
    write(
        "config_sentence_transformers.json",
        r#"{"model_type": "CrossEncoder", "default_prompt_name": "web",
            "prompts": {"web": "bad ", "topic": "a cab "}}"#,
    )?;
    let model = dir.path().to_str().expect("UTF-8");
    let rank = |query: &str, more: &[&str]| {
        let arguments = [&["rerank", "--model", model, "--query", query], more, &["a", "fade"]];
        stdout(encodle(&arguments.concat(), b"").success())
    };
    let bare = rank("cab", &["--prompt", ""]);
    assert_eq!(rank("cab", &[]), rank("bad cab", &["--prompt", ""]));
    assert_ne!(rank("cab", &[]), bare);
    assert_eq!(rank("cab", &["--prompt-name", "topic"]), rank("a cab cab", &["--prompt", ""]));
    let unknown = ["rerank", "--model", model, "--query", "a", "--prompt-name", "x", "b"];
    assert_eq!(
        stderr(encodle(&unknown, b"").code(1)),
        "encodle: prompt \"x\" is unknown: expected one of topic, web"
    );
    // The folder has no pooling. Commands that compute no embeddings can run the model.
    let inspected = stdout(encodle(&["inspect", model], b"").success());
    assert!(
        inspected.contains("runs as      EncoderModel, EncoderForSequenceClassification\n"),
        "{inspected}"
    );
    encodle(&["attention", "--model", model, "a cab"], b"").success();
    encodle(&["classify", "--model", model, "a cab"], b"").success();
    Ok(())
}

#[test]
fn labels_with_the_same_name_have_separate_scores() -> anyhow::Result<()> {
    let dir = golden_copy("heads/sequence", &["model.safetensors", "vocab.txt"])?;
    let config = std::fs::read_to_string(golden("heads/sequence/config.json"))?;
    let mut config: serde_json::Value = serde_json::from_str(&config)?;
    config["id2label"] = serde_json::json!({"0": "x", "1": "y", "2": "x"});
    std::fs::write(dir.path().join("config.json"), config.to_string())?;
    let model = dir.path().to_str().expect("UTF-8");
    let line = stdout(encodle(&["classify", "--model", model, "a cab"], b"").success());
    let line: serde_json::Value = serde_json::from_str(&line)?;
    let names: Vec<&String> = line["scores"].as_object().expect("scores").keys().collect();
    assert_eq!(names, ["x (0)", "y", "x (2)"]);
    Ok(())
}

/// The tokenizer adds no special tokens, so that an empty text has no tokens.
#[test]
fn texts_before_a_refused_one_are_classified_and_the_error_names_its_line() -> anyhow::Result<()> {
    let dir = golden_copy("heads/sequence", &["config.json", "model.safetensors"])?;
    let words = std::fs::read_to_string(golden("heads/sequence/vocab.txt"))?;
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..).zip(words.lines()).map(|(id, word)| (word.to_string(), id.into())).collect();
    let sequence = |id| serde_json::json!({"Sequence": {"id": id, "type_id": 0}});
    let tokenizer = serde_json::json!({
        "added_tokens": [],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [sequence("A")],
            "pair": [sequence("A"), sequence("B")],
            "special_tokens": {},
        },
        "model": {
            "type": "WordPiece",
            "vocab": vocab,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    });
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string())?;
    let class = r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), class)?;
    let model = dir.path().to_str().expect("UTF-8");
    let run = encodle(&["classify", "--model", model], b"a cab\nfade\n\nbad\n").code(1);
    assert_eq!(run.get_output().stdout.split(|&byte| byte == b'\n').count(), 3); // 2 lines
    let error = stderr(run);
    assert!(
        error.starts_with("encodle: standard input, line 3: text \"\" has no tokens"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_task_prints_the_results_of_all_texts_before_an_invalid_record() {
    for (command, folder) in [("classify", "sequence"), ("tag", "tagger")] {
        let model = golden(&format!("heads/{folder}"));
        let arguments = [command, "--model", model.to_str().unwrap()];
        let run = encodle(&arguments, b"a cab\nfade\nbad\nna\xefve\n").code(1);
        let lines = run.get_output().stdout.split(|&byte| byte == b'\n').count() - 1;
        assert_eq!(lines, 3, "{command}");
        let error = stderr(run);
        assert!(error.starts_with("encodle: standard input, line 4: expected UTF-8"), "{error}");
    }
}

#[test]
fn classify_fill_mask_and_rerank_print_json_lines() -> anyhow::Result<()> {
    let folder = |name: &str| golden(&format!("heads/{name}")).to_str().unwrap().to_string();
    let lines = |text: String| -> anyhow::Result<Vec<serde_json::Value>> {
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    };
    let classified = lines(stdout(
        encodle(&["classify", "--model", &folder("sequence")], b"a cab\nfade\n").success(),
    ))?;
    assert_eq!(classified.len(), 2);
    for line in &classified {
        let scores: Vec<f64> =
            line["scores"].as_object().unwrap().values().map(|x| x.as_f64().unwrap()).collect();
        assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{line}");
        assert_eq!(line["scores"][line["label"].as_str().unwrap()], line["score"]);
    }
    let model = folder("masked_lm");
    let arguments = ["fill-mask", "--model", &model, "--top", "2", "a [MASK] cab"];
    let filled = lines(stdout(encodle(&arguments, b"").success()))?;
    assert_eq!(filled[0]["masks"][0].as_array().unwrap().len(), 2, "{filled:?}");
    let model = folder("score");
    let arguments = ["rerank", "--model", &model, "--query", "bad cab", "a cab", "", "yz", "fade"];
    let ranked = lines(stdout(encodle(&arguments, b"").success()))?;
    let order: Vec<u64> = ranked.iter().map(|line| line["document"].as_u64().unwrap()).collect();
    assert_eq!(order, [2, 3, 1, 4]);
    let top = lines(stdout(encodle(&[&arguments[..], &["--top", "1"]].concat(), b"").success()))?;
    assert_eq!(top, ranked[..1]);
    let model = golden("multi_vector/expansion");
    let model = model.to_str().unwrap();
    let arguments = ["rerank", "--model", model, "--query", "the cat", "a dog", "the cat"];
    let ranked = lines(stdout(encodle(&arguments, b"").success()))?;
    assert_eq!((ranked[0]["document"].as_u64(), ranked.len()), (Some(2), 2), "{ranked:?}");
    assert_eq!(
        stderr(
            encodle(&["rerank", "--model", &folder("sequence"), "--query", "a", "b"], b"").code(1)
        ),
        "encodle: number of labels 3 is invalid: expected 1, for reranking"
    );
    Ok(())
}

/// Spans are in characters, not in bytes.
#[test]
fn tag_and_answer_print_spans_in_characters() -> anyhow::Result<()> {
    let folder = |name: &str| golden(&format!("heads/{name}")).to_str().unwrap().to_string();
    let check_span = |text: &str, found: &serde_json::Value| {
        let at = |key: &str| found[key].as_u64().unwrap() as usize;
        let range = text.chars().skip(at("start")).take(at("end") - at("start"));
        assert_eq!(found["text"], serde_json::Value::String(range.collect()), "{found}");
    };
    let text = "Café bead, Abba (cab) ébb faced";
    let tagger = folder("tagger");
    let arguments = ["tag", "--model", &tagger, "--aggregation", "max", text, ""];
    let output = stdout(encodle(&arguments, b"").success());
    let lines: Vec<serde_json::Value> =
        output.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let entities = lines[0]["entities"].as_array().unwrap();
    assert_eq!((lines.len(), entities.len(), &entities[1]["text"]), (2, 2, &"faced".into()));
    assert_eq!(entities[0]["label"], "LOC");
    entities.iter().for_each(|entity| check_span(text, entity));

    let text = "A café fed, a cab: bead";
    let model = folder("answer");
    let arguments = ["answer", "--model", &model, "--question", "bad?", "--top", "2"];
    let line: serde_json::Value =
        serde_json::from_str(&stdout(encodle(&arguments, text.as_bytes()).success()))?;
    let answers = line["answers"].as_array().unwrap();
    assert_eq!((answers.len(), &answers[0]["text"]), (2, &"bead".into()));
    answers.iter().for_each(|answer| check_span(text, answer));
    assert!(line["no_answer"].as_f64().unwrap() > 0.0);
    Ok(())
}

#[test]
fn attention_is_printed_as_a_table() {
    let printed = |arguments: &[&str]| {
        stdout(encodle(&[&["attention", "I love AI"], arguments].concat(), b"").success())
    };
    let table = printed(&["--layer", "2", "--head", "3"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], "layer 2, head 3");
    assert_eq!(
        lines[1].split_whitespace().collect::<Vec<_>>(),
        ["[CLS]", "i", "love", "ai", "[SEP]"]
    );
    assert_eq!(
        lines[3].split_whitespace().collect::<Vec<_>>(),
        ["i", "0.15", "0.03", "0.37", "0.31", "0.15"]
    );
    assert!(!table.contains('\x1b'), "no colours without a terminal");
    assert!(printed(&[]).starts_with("layer 5, mean of 12 heads\n"));
    assert_eq!(printed(&["--head", "all"]).matches("layer 5, head").count(), 12);
    let long = "word ".repeat(60);
    let list = stdout(encodle(&["attention", &long], b"").success());
    assert_eq!(list.lines().count(), 64, "one line per token: {list}");
    assert_eq!(
        stderr(encodle(&["attention", "--layer", "6", "a"], b"").code(1)),
        "encodle: layer 6 does not exist: expected 0 to 5"
    );
    assert_eq!(
        stderr(encodle(&["attention", "--head", "x", "a"], b"").code(2)),
        "encodle: invalid value 'x' for '--head <H|all|mean>': expected the number of a head (from 0), all or mean; \
         see encodle attention --help"
    );
}

#[test]
fn attention_is_written_as_pictures_and_numbers() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let write = |name: &str| -> anyhow::Result<String> {
        let path = dir.path().join(name);
        let path = path.to_str().unwrap();
        let text = "<b> & \"quotes\"";
        encodle(&["attention", text, "--pair", "I love AI", "--output", path], b"").success();
        Ok(std::fs::read_to_string(path)?)
    };
    let html = write("a.html")?;
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    let fetched = html.replace("http://www.w3.org/2000/svg", "");
    assert!(
        !fetched.contains("<script") && !fetched.contains("://"),
        "no external resources, no scripts"
    );
    assert!(html.contains("<title>love → ai: 0."), "a tooltip per weight");
    assert_eq!(html.matches("data:image/png;base64,").count(), 6 * 12);
    assert!(html.contains("&lt;b&gt; &amp; &quot;quotes&quot; / I love AI"), "{}", &html[..400]);
    assert!(write("a.svg")?.starts_with("<svg xmlns="));

    let json: serde_json::Value = serde_json::from_str(&write("a.json")?)?;
    let tokens = json["tokens"].as_array().unwrap().len();
    let row = json["weights"][5][11][tokens - 1].as_array().unwrap();
    assert_eq!(row.len(), tokens);
    assert!((row.iter().map(|x| x.as_f64().unwrap()).sum::<f64>() - 1.0).abs() < 1e-5);
    let csv = write("a.csv")?;
    assert_eq!(csv.lines().count(), 1 + 6 * 12 * tokens * tokens);
    assert!(csv.contains(",\"\"\"\","), "a quote is doubled");

    let path = dir.path().join("a.jpg");
    let line =
        stderr(encodle(&["attention", "a", "--output", path.to_str().unwrap()], b"").code(2));
    assert!(
        line.ends_with(
            "has an unknown extension: expected .html, .svg, .png, .csv or .json; \
             see encodle attention --help"
        ),
        "{line}"
    );
    let line =
        stderr(encodle(&["attention", "a", "--output", "no/such/folder/a.svg"], b"").code(1));
    assert!(
        line.ends_with("no/such/folder/a.svg cannot be written: expected its directory to exist"),
        "{line}"
    );
    assert_eq!(std::fs::read_dir(dir.path())?.count(), 4, "no incomplete file is left");
    Ok(())
}

/// Each token of the decoder attends to itself, to the tokens before it and to the encoder's text.
#[test]
fn attention_shows_decoders_and_cross_attention() -> anyhow::Result<()> {
    let folder = |name: &str| -> anyhow::Result<tempfile::TempDir> {
        let dir = golden_copy(name, &["config.json", "model.safetensors"])?;
        std::fs::copy(golden("heads/score/vocab.txt"), dir.path().join("vocab.txt"))?;
        Ok(dir)
    };
    let (both, decoder) = (folder("bert2bert")?, folder("bert_lm")?);
    let run = |dir: &tempfile::TempDir, more: &[&str]| {
        let model = dir.path().to_str().unwrap();
        encodle(&[&["attention", "--model", model, "a cab"], more].concat(), b"")
    };
    let json = |dir: &tempfile::TempDir, more: &[&str]| -> anyhow::Result<serde_json::Value> {
        let path = dir.path().join("out.json");
        run(dir, &[more, &["--output", path.to_str().unwrap()]].concat()).success();
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    };
    let weights = |found: &serde_json::Value| -> anyhow::Result<Vec<Vec<Vec<Vec<f64>>>>> {
        Ok(serde_json::from_value(found["weights"].clone())?)
    };

    let cross = json(&both, &["--pair", "cab"])?;
    let keys = serde_json::json!(["[CLS]", "a", "c", "##a", "##b", "[SEP]"]);
    assert_eq!(cross["keys"], keys);
    assert_eq!(cross["tokens"], serde_json::json!(["[UNK]", "c", "##a", "##b"]));
    for row in weights(&cross)?.iter().flatten().flatten() {
        assert!(row.len() == 6 && (row.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{row:?}");
    }
    let causal = json(&both, &["--pair", "cab", "--kind", "decoder"])?;
    assert!(causal.get("keys").is_none());
    for head in weights(&causal)?.iter().flatten() {
        for (query, row) in head.iter().enumerate() {
            assert!(row[query + 1..].iter().all(|&weight| weight == 0.0), "{row:?}");
        }
    }
    assert_eq!(json(&both, &["--kind", "encoder"])?["tokens"], keys);
    let written = json(&both, &[])?["tokens"].as_array().expect("tokens").len();
    assert!(written > 1, "the decoder generates its text");

    let table = stdout(run(&both, &["--pair", "cab"]).success());
    assert!(
        table.starts_with("layer 1, mean of 3 heads\n") && table.lines().count() == 7,
        "{table}"
    );
    for name in ["out.html", "out.svg", "out.png", "out.csv"] {
        let path = both.path().join(name);
        run(&both, &["--pair", "cab", "--output", path.to_str().unwrap()]).success();
        let content = std::fs::read(path)?;
        match name {
            "out.png" => assert!(content.starts_with(b"\x89PNG")),
            "out.csv" => assert_eq!(content.split(|&b| b == b'\n').count(), 2 + 2 * 3 * 4 * 6),
            _ => assert!(String::from_utf8(content)?.contains("a cab / cab (cross attention)")),
        }
    }
    for (arguments, title) in [
        (&["--kind", "encoder", "--pair", "cab"][..], ">a cab (encoder attention)<"),
        (&["--kind", "decoder", "--pair", "cab"], ">cab (decoder attention)<"),
        (&["--kind", "decoder"], ">generated text (decoder attention)<"),
        (&["--kind", "cross"], ">a cab / generated text (cross attention)<"),
    ] {
        let path = both.path().join("out.svg");
        let output = ["--output", path.to_str().unwrap()];
        run(&both, &[arguments, &output].concat()).success();
        let svg = std::fs::read_to_string(path)?;
        assert!(svg.contains(title), "{arguments:?}: {svg:.500}");
    }

    let long = "a ".repeat(50);
    let model = both.path().to_str().unwrap();
    for (text, more, nouns) in [
        (&long[..], &["--kind", "encoder"][..], &["text"][..]),
        (&long, &["--kind", "decoder", "--pair", "a"], &["text"]),
        ("a", &["--kind", "decoder", "--pair", &long], &["text of the decoder"]),
        (&long, &["--kind", "cross", "--pair", &long], &["text", "text of the decoder"]),
        ("a", &["--kind", "encoder", "--pair", &long], &[]),
    ] {
        let output =
            encodle(&[&["attention", "--model", model, text], more].concat(), b"").success();
        let warnings = String::from_utf8(output.get_output().stderr.clone())?;
        let found: Vec<&str> = warnings
            .lines()
            .map(|line| line.trim_start_matches("encodle: 1 ").split(" truncated").next().unwrap())
            .collect();
        assert_eq!(found, nouns, "{more:?}: {warnings}");
    }

    // With a null `is_decoder` the model is an encoder.
    let encoder = folder("heads/score")?;
    let path = encoder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    config["is_decoder"] = serde_json::Value::Null;
    std::fs::write(path, config.to_string())?;
    assert_eq!(json(&encoder, &["--kind", "encoder"])?["tokens"], keys);

    assert_eq!(json(&decoder, &[])?["tokens"], keys);
    assert_eq!(
        stderr(run(&decoder, &["--pair", "b"]).code(1)),
        "encodle: the model is a decoder, which reads one text: expected no second text, got \"b\""
    );
    assert_eq!(
        stderr(run(&decoder, &["--kind", "cross"]).code(1)),
        "encodle: the model has no cross attention: expected --kind decoder"
    );
    Ok(())
}

#[test]
fn similarity_and_compare_print_cosines() {
    let [a, b, c] =
        ["A man is eating food.", "A man is eating bread.", "The new movie is awesome."];
    assert_eq!(stdout(encodle(&["similarity", a, b], b"").success()), "0.744196\n");
    let table = stdout(encodle(&["compare", a, b, c], b"").success());
    assert!(table.lines().nth(1).unwrap().ends_with("1.000   0.744  -0.046"), "{table}");
    encodle(&["compare", a], b"").code(2);
}

#[test]
fn completions_and_manual_pages_are_printed() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = stdout(encodle(&["completions", shell], b"").success());
        assert!(script.contains("fill-mask"), "{shell}");
    }
    assert!(stdout(encodle(&["man"], b"").success()).contains(".TH encodle 1"));
    assert!(stdout(encodle(&["man", "attention"], b"").success()).contains("I love AI"));
    assert_eq!(
        stderr(encodle(&["man", "embd"], b"").code(2)),
        "encodle: command \"embd\" does not exist; see encodle man --help"
    );
}

#[test]
fn inspect_describes_a_model_and_its_problems() -> anyhow::Result<()> {
    let text = stdout(encodle(&["inspect", MINILM], b"").success());
    for line in [
        "tensors      103 of f16; 22713216 values",
        "architecture BERT encoder",
        "prefix       none",
        "layer norm   weight and bias",
        "heads        pooler",
        "tokenizer    tokenizer.json",
        "modules      Pooling(mean), Normalize",
        "runs as      EncoderModel, Embedder",
    ] {
        assert!(text.lines().any(|got| got == line), "{line}\nnot in\n{text}");
    }
    let folder = golden("bert2bert");
    let folder = folder.to_str().unwrap();
    let json = stdout(encodle(&["inspect", "--format", "json", folder], b"").success());
    let json: serde_json::Value = serde_json::from_str(&json)?;
    assert_eq!(
        (&json["architecture"], &json["runs_as"][0]),
        (&"BERT encoder-decoder".into(), &"EncoderDecoder".into())
    );

    let broken = golden_copy("bert_gelu", &["model.safetensors"])?;
    let config = std::fs::read_to_string(golden("bert_gelu/config.json"))?;
    let config = config.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    std::fs::write(broken.path().join("config.json"), config)?;
    let text = stdout(encodle(&["inspect", broken.path().to_str().unwrap()], b"").code(1));
    assert!(text.contains("runs as      none"), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("problem")).count(), 16, "{text}");
    Ok(())
}

#[test]
fn empty_input_is_not_an_error() {
    assert_eq!(stdout(encodle(&["embed"], b"").success()), "");
    assert_eq!(
        stdout(encodle(&["embed", "--format", "table"], b"").success()),
        "0 texts, 384 dimensions\n"
    );
}

#[test]
fn invalid_input_prints_one_line_and_exits_with_1() {
    let assert = encodle(&["embed"], b"good\nna\xefve\n").code(1);
    assert_eq!(stdout(assert).lines().count(), 1, "the texts before the error are written");
    assert_eq!(
        stderr(encodle(&["embed"], b"good\nna\xefve\n").code(1)),
        "encodle: standard input, line 2: expected UTF-8, got an invalid byte at position 3"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--model", "no/such/model", "a"], b"").code(1)),
        "encodle: model \"no/such/model\" not found: expected a folder, a weights file, or \
         org/name[@revision] on the hub"
    );
    let no_json = tempfile::tempdir().unwrap();
    std::fs::write(no_json.path().join("modules.json"), "[").unwrap();
    let folder = no_json.path().to_str().unwrap();
    let line = stderr(encodle(&["embed", "--model", folder, "a"], b"").code(1));
    assert!(line.contains("modules.json cannot be parsed: "), "{line}");
}

/// A warning or an error that cannot be printed does not change the exit code.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_error_does_not_change_the_exit_code() -> anyhow::Result<()> {
    for (arguments, code) in [
        (&["embed", "--threads", "70000", "a"][..], 0), // a warning
        (&["embed", "--input", "no/such/file"], 1),
        (&["embed", "--formt", "table"], 2),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full")?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_encodle"));
        let status = command.envs(ENVIRONMENT).args(arguments).stderr(full).status()?;
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn help_that_cannot_be_printed_is_an_error() -> anyhow::Result<()> {
    let full = std::fs::File::options().write(true).open("/dev/full")?;
    let status = Command::new(env!("CARGO_BIN_EXE_encodle")).arg("--help").stdout(full).status()?;
    assert_eq!(status.code(), Some(1));
    Ok(())
}

#[test]
fn a_usage_error_prints_one_line_and_exits_with_2() {
    assert_eq!(
        stderr(encodle(&["embed", "--formt", "table"], b"").code(2)),
        "encodle: unexpected argument '--formt' found; \
         tip: a similar argument exists: '--format'; see encodle embed --help"
    );
    assert_eq!(
        stderr(encodle(&["embed", "--format", "xml"], b"").code(2)),
        "encodle: invalid value 'xml' for '--format <FORMAT>'; \
         [possible values: table, jsonl, npy, parquet, arrow]; see encodle embed --help"
    );
    for command in ["answer", "fill-mask", "rerank", "search"] {
        assert_eq!(
            stderr(encodle(&[command, "--top", "0"], b"").code(2)),
            format!(
                "encodle: invalid value '0' for '--top <N>': expected a whole number of at least 1; \
                 see encodle {command} --help"
            )
        );
    }
    assert_eq!(
        stderr(encodle(&["embd"], b"").code(2)),
        "encodle: unrecognized subcommand 'embd'; \
         tip: a similar subcommand exists: 'embed'; see encodle --help"
    );
    let help = stdout(encodle(&["embed", "--help"], b"").success());
    assert!(help.contains("--model <MODEL>"), "{help}");
    for arguments in [&["help", "--help"][..], &["help", "-h"], &["help"]] {
        let help = stdout(encodle(arguments, b"").success());
        assert!(help.contains("Usage: encodle <COMMAND>"), "{help}");
    }
    assert!(
        stdout(encodle(&["help", "embed", "--help"], b"").success()).contains("--model <MODEL>")
    );
}

/// The reader closes the pipe after one line, before the output is complete.
#[test]
fn a_closed_pipe_is_not_an_error() -> anyhow::Result<()> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_encodle"))
        .envs(ENVIRONMENT)
        .args(["embed", "--model", MINILM])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().expect("a pipe");
    let writer = std::thread::spawn(move || input.write_all("a line\n".repeat(3000).as_bytes()));
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line)?;
    assert!(line.starts_with("{\"text\":\"a line\""));
    let mut errors = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut errors)?;
    let _ = writer.join(); // fails if the program has ended
    assert!(child.wait()?.success(), "{errors}");
    assert_eq!(errors, "");
    Ok(())
}

/// The peak resident memory of a process of `encodle`, in bytes, and its exit code.
#[cfg(target_os = "linux")]
pub fn peak_memory(arguments: &[&str]) -> anyhow::Result<(u64, Option<i32>)> {
    let mut process = Command::new(assert_cmd::cargo::cargo_bin!("encodle"));
    let process = process.envs(ENVIRONMENT).args(arguments).stdout(Stdio::null());
    let mut process = process.stderr(Stdio::null()).spawn()?;
    let status = format!("/proc/{}/status", process.id());
    let mut peak = 0;
    loop {
        let read = std::fs::read_to_string(&status).unwrap_or_default();
        let line = read.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = kib.map_or(peak, |kib| kib << 10);
        if let Some(status) = process.try_wait()? {
            return Ok((peak, status.code()));
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_line_of_20_mb_is_truncated_in_little_memory() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_string();
    let (input, output) = (path("line.txt"), path("vectors.npy"));
    std::fs::write(&input, "the man eats food ".repeat((20 << 20) / 18))?;
    let arguments = ["embed", "--input", &input, "--output", &output];
    let (peak, code) = peak_memory(&arguments)?;
    assert_eq!(code, Some(0));
    assert!(peak < 250 << 20, "{} MiB", peak >> 20); // 2 GiB if the text is tokenized at once
    Ok(())
}
