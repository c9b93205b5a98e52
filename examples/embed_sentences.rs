//! Embeds sentences and compares them: `cargo run --release --example embed_sentences`.

use anyhow::Result;
use encoder::{Embedder, LoadOptions};

fn main() -> Result<()> {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/weights/all-MiniLM-L6-v2");
    let embedder = Embedder::from_dir(dir, &LoadOptions::default())?;
    println!("{}\n", embedder.report());

    let sentences = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "Someone in a gorilla costume is playing drums.",
        "A monkey is playing drums.",
        "The new movie is awesome.",
    ];
    let embeddings = embedder.embed(&sentences)?; // (5, 384), each of length 1
    let cosines = embeddings.matmul(&embeddings.t()?)?.to_vec2::<f32>()?; // (5, 5)
    for (sentence, row) in sentences.iter().zip(&cosines) {
        let row: Vec<String> = row.iter().map(|cosine| format!("{cosine:6.3}")).collect();
        println!("{}  {sentence}", row.join(" "));
    }

    let mut pairs: Vec<(usize, usize)> = vec![];
    for i in 0..sentences.len() {
        pairs.extend((0..i).map(|j| (j, i)));
    }
    pairs.sort_by(|a, b| cosines[b.0][b.1].total_cmp(&cosines[a.0][a.1]));
    println!("\nmost similar pairs:");
    for &(i, j) in &pairs[..2] {
        println!("{:6.3}  {} ~ {}", cosines[i][j], sentences[i], sentences[j]);
    }
    assert_eq!(
        pairs[0],
        (0, 1),
        "expected the two sentences about a man eating to be the most similar pair"
    );
    Ok(())
}
