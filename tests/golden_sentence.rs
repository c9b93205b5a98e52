//! Compares the steps before and after the encoder with transformers and sentence-transformers:
//! WordPiece, prompts, pooling, `Dense` modules.

use std::{fs, path::Path};

use candle_core::{IndexOp, Tensor};
use encoder::{
    EmbedOptions, Embedder, LoadOptions, LongTexts, ModelConfig, ModelFiles, Pooling, PoolingMode,
    Precision, Prompt, TextTokenizer,
};
use tempfile::TempDir;

use crate::support::{
    Golden, MINILM, assert_close, copy_folder, golden, is_recording, record_digest, temp_dir,
};

type Result<T = ()> = anyhow::Result<T>;

/// Every pooling mode. The sequences are padded in the golden file, and a ragged batch here.
#[test]
fn poolings_equal_sentence_transformers() -> Result {
    let expected = Golden::open("pooling.safetensors")?;
    let lengths = expected.get("lengths").to_vec1::<i64>()?;
    let (mut sequences, mut offsets) = (vec![], vec![0]);
    for (i, &length) in lengths.iter().enumerate() {
        sequences.push(expected.get("hidden").i((i, ..length as usize))?);
        offsets.push(offsets[i] + length as usize);
    }
    let hidden = Tensor::cat(&sequences, 0)?; // (N, E)
    let cases = expected.tensors().into_keys().filter(|name| name.contains('.'));
    let mut count = 0;
    for case in cases {
        let (names, prompt) = case.split_once('.').expect("a mode and the tokens of a prompt");
        let modes = names.split('+').map(|name| name.parse().map_err(anyhow::Error::msg));
        let pooling = Pooling::new(&modes.collect::<Result<Vec<PoolingMode>>>()?)?;
        let prompts = vec![prompt.parse()?; lengths.len()];
        let got = match prompt {
            "0" => pooling.forward(&hidden, &offsets, Some(&prompts))?,
            _ => pooling.without_prompt().forward(&hidden, &offsets, Some(&prompts))?,
        };
        assert_close(&case, &got, expected.get(&case), 1e-6);
        count += 1;
    }
    assert_eq!(count, 14);
    Ok(())
}

/// A folder with the files of MiniLM's Transformer module and those of the folder `overlay`.
fn minilm_with(overlay: &Path) -> Result<TempDir> {
    let dir = temp_dir()?;
    for name in ["config.json", "model.safetensors", "tokenizer.json", "sentence_bert_config.json"]
    {
        fs::copy(Path::new(MINILM).join(name), dir.path().join(name))?;
    }
    copy_folder(overlay, dir.path())?;
    Ok(dir)
}

/// Two pooling modes without the prompt, three `Dense` modules (two with residuals), `Normalize`;
/// every kind of prompt; vectors truncated to five values.
#[test]
fn all_modules_and_prompts_equal_sentence_transformers() -> Result {
    let expected = Golden::open("sentence_chain.safetensors")?;
    let texts = fs::read_to_string(golden("sentences.txt"))?;
    let texts: Vec<&str> = texts.lines().collect();
    let dir = minilm_with(&golden("sentence_chain"))?;
    let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default())?;
    assert_eq!(embedder.dimension(), 9);
    let with = |prompt| {
        let options = EmbedOptions::new().with_prompt(prompt);
        Ok::<_, encoder::Error>(embedder.embed_with(&texts, options)?.vectors)
    };
    for (name, got) in [
        ("default", embedder.embed(&texts)?),
        ("query", with(Prompt::Query)?),
        ("document", with(Prompt::Document)?),
        ("passage", with(Prompt::Named("passage"))?),
        ("text", with(Prompt::Text("Say: "))?),
        ("cut", embedder.clone().with_dimension(5)?.embed(&texts)?),
    ] {
        assert_close(name, &got, expected.get(name), 2e-6);
    }
    assert_eq!(
        with(Prompt::Named("title")).unwrap_err().to_string(),
        "prompt \"title\" is unknown: expected one of document, passage, query, topic"
    );
    assert_eq!(
        embedder.with_dimension(10).expect_err("an error").to_string(),
        "embeddings cannot be truncated to dimension 10: expected 1 to 9 (the dimension of \
         the model's embeddings)"
    );
    Ok(())
}

/// The maximum length is 256: a window holds 254 words and two special tokens.
#[test]
fn a_long_text_is_the_mean_of_its_windows_weighted_by_tokens() -> Result {
    let embedder = Embedder::from_dir(MINILM, &LoadOptions::default())?;
    let [long, first, second] = [300, 254, 46].map(|n| "and ".repeat(n));
    let options = EmbedOptions::new().with_long_texts(LongTexts::Windows);
    let texts = ["short", &long, "also short"];
    let got = embedder.embed_with(&texts, options)?;
    assert_eq!(got.truncated, []);
    let parts = embedder.embed(&[first, second])?;
    let sum = ((parts.i(0)? * 254.0)? + (parts.i(1)? * 46.0)?)?;
    let expected = sum.broadcast_div(&sum.sqr()?.sum_all()?.sqrt()?)?;
    assert_close("windows", &got.vectors.i(1)?, &expected, 1e-6);
    let short = embedder.embed(&["short"])?;
    assert_close("a text that fits", &got.vectors.i(..1)?, &short, 0.0);
    Ok(())
}

/// A prompt that is not pooled must leave room for text in the first window.
#[test]
fn a_prompt_that_fills_a_window_is_an_error() -> Result {
    let files = ModelFiles::dir(MINILM)?;
    let pooling = Pooling::from(PoolingMode::Mean).without_prompt();
    let embedder = Embedder::from_transformer(&files, pooling, &LoadOptions::default())?;
    let embedder = embedder.with_max_seq_length(8)?;
    let embed = |words: usize, long_texts| {
        let prompt = "and ".repeat(words);
        let options = EmbedOptions::new().with_prompt(Prompt::Text(&prompt));
        embedder.embed_with(&["I love AI"], options.with_long_texts(long_texts))
    };
    assert!(embed(5, LongTexts::Windows)?.vectors.sum_all()?.to_scalar::<f32>()?.is_finite());
    for words in [6, 12] {
        let error = embed(words, LongTexts::Windows).unwrap_err().to_string();
        assert!(error.starts_with("the prompt has 7 tokens or more"), "{error}");
        embed(words, LongTexts::Truncate)?;
    }
    Ok(())
}

#[test]
fn pooling_and_normalisation_chosen_by_the_caller_equal_those_of_the_folder() -> Result {
    let files = ModelFiles::dir(MINILM)?;
    let bare =
        Embedder::from_transformer(&files, PoolingMode::Mean.into(), &LoadOptions::default())?;
    let squared_length =
        |e: &Embedder| e.embed(&["I love AI"])?.sqr()?.sum_all()?.to_scalar::<f32>();
    assert!(squared_length(&bare)? > 2.0, "the vectors are not normalised");
    let normalized = bare.normalized();
    let whole = Embedder::from_dir(MINILM, &LoadOptions::default())?;
    let texts = ["I love AI"];
    assert_close("normalised", &normalized.embed(&texts)?, &whole.embed(&texts)?, 0.0);
    Ok(())
}

/// Texts with accents, many scripts, emoji, control characters, special tokens and long words,
/// truncated to 100 tokens.
#[test]
fn token_ids_of_unusual_texts_equal_transformers() -> Result {
    let expected = Golden::open("nasty_texts.safetensors")?;
    let texts: Vec<String> = serde_json::from_slice(&fs::read(golden("nasty_texts.json"))?)?;
    assert_eq!(texts.len(), 500);
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(Path::new(MINILM).join("tokenizer.json"))?)?;
    let vocabulary = json["model"]["vocab"].as_object().expect("tokens and ids");
    let mut tokens = vec![""; vocabulary.len()];
    for (token, id) in vocabulary {
        tokens[id.as_u64().expect("an id") as usize] = token;
    }
    let config = ModelConfig::from_json(&fs::read(Path::new(MINILM).join("config.json"))?, "")?;
    for (name, switches) in [
        ("default", ""),
        ("cased", r#", "do_lower_case": false"#),
        ("accents", r#", "strip_accents": false"#),
        ("cased_without_accents", r#", "do_lower_case": false, "strip_accents": true"#),
        ("chinese_words", r#", "tokenize_chinese_chars": false"#),
    ] {
        let dir = temp_dir()?;
        fs::write(dir.path().join("vocab.txt"), tokens.join("\n") + "\n")?;
        let json =
            format!(r#"{{"tokenizer_class": "BertTokenizer", "model_max_length": 100{switches}}}"#);
        fs::write(dir.path().join("tokenizer_config.json"), json)?;
        let tokenizer = TextTokenizer::from_files(&ModelFiles::dir(dir.path())?, &config)?;
        let lengths = expected.get(&format!("{name}.lengths")).to_vec1::<i32>()?;
        let ids = expected.get(&format!("{name}.ids")).to_vec1::<i32>()?;
        assert_eq!(lengths.len(), texts.len());
        let mut start = 0;
        for ((text, tokens), length) in texts.iter().zip(tokenizer.encode(&texts)?).zip(lengths) {
            let expected = &ids[start..start + length as usize];
            let got: Vec<i32> = tokens.input_ids.iter().map(|&id| id as i32).collect();
            assert_eq!(got, expected, "{name}: {text:?}");
            start += length as usize;
        }
    }
    Ok(())
}

/// 20 sentences, or 1,000 whose digests are recorded to compare instruction sets and machines.
#[test]
fn embeddings_of_many_sentences_have_unit_length() -> Result {
    let sentences = fs::read_to_string(golden("sentences.txt"))?;
    let sentences: Vec<&str> = sentences.lines().collect();
    let count = if is_recording() { 1000 } else { 20 };
    let n = sentences.len();
    let three = |i: usize| [i, i / n, i / n / n].map(|i| sentences[i % n]).join(" ");
    let texts: Vec<String> = (0..count).map(three).collect();
    for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
        let options = LoadOptions::default().with_precision(precision);
        let vectors = Embedder::from_dir(MINILM, &options)?.embed(&texts)?;
        let squares = vectors.sqr()?.sum_keepdim(1)?; // (N, 1)
        assert_close("squares", &squares, &squares.ones_like()?, 1e-6);
        record_digest(&format!("{count} sentences, {precision}"), &vectors)?;
    }
    Ok(())
}
