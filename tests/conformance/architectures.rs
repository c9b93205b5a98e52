//! Every architecture but BERT, decoders included: prefixes, the spellings of tensor names and config keys, dtypes,
//! shards, missing tensors, heads, and similar models that are refused.
//!
//! Each case except the inspection compares the model's outputs, bit for bit, with those of the
//! golden checkpoint; the case of f16 weights compares with the golden checkpoint rounded to f16.

use std::collections::BTreeSet;

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{
    CausalLm, EncoderForMaskedLm, EncoderForSequenceClassification, EncoderModel, LoadOptions,
    LoadReport, ModelFiles,
};
use mha::AttentionMask;
use serde_json::{Value, json};

use super::{
    Checkpoint, Outcome, Table, describe,
    tensors::{inspect, inspect_files},
    weight_files,
};
use crate::{
    golden_architectures::architectures,
    golden_decoders::decoders,
    support::{self, max_difference},
};

/// A folder of golden checkpoints, and the changes that the cases make to them.
struct Row {
    /// The folder in `tests/golden`.
    folder: &'static str,
    /// The prefixes of the encoder's tensors in a checkpoint with a head.
    prefixes: &'static [&'static str],
    /// Other spellings of the tensor names and config keys of the same encoder.
    spellings: &'static [Change],
    /// Keys of published configs that do not change the encoder's result.
    other_keys: &'static str,
    /// A tensor that the encoder needs.
    needed: &'static str,
    /// A tensor of a head that an encoder ignores.
    of_head: &'static str,
    /// A tensor of a similar model that this architecture does not have.
    foreign: &'static str,
    /// The modules with the output matrix and with the bias of the language model head. A
    /// checkpoint of an encoder may store the bias in either of the two.
    lm_head: [&'static str; 2],
    /// Other spellings of the tensor names of the language model.
    lm_spellings: &'static [Change],
    /// Keys, each with a value that the architecture does not implement.
    refused: &'static [(&'static str, &'static str)],
}

/// The name of a case, and the change to the golden checkpoint.
type Change = (&'static str, fn(&mut Checkpoint));

/// Keys with values that no architecture implements.
const REFUSED_BY_ALL: [(&str, &str); 3] = [
    ("is_decoder", "true"),
    ("auto_map", r#"{"AutoModel": "org/name--modeling.OtherModel"}"#),
    ("quantization_config", r#"{"quant_method": "gptq"}"#),
];

const ROWS: [Row; 20] = [
    Row {
        folder: "architectures/roberta",
        prefixes: &["roberta."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"gradient_checkpointing": false, "position_embedding_type": "absolute"}"#,
        needed: "encoder.layer.0.attention.self.query.weight",
        of_head: "lm_head.dense.weight",
        foreign: "encoder.layer.0.attention.self.distance_embedding.weight",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[GAMMA_BETA],
        refused: &[
            ("model_type", "\"roberta-prelayernorm\""),
            ("model_type", "\"data2vec-text\""),
            ("model_type", "\"longformer\""),
            ("position_embedding_type", "\"relative_key_query\""),
            ("hidden_act", "\"swiglu\""),
        ],
    },
    Row {
        folder: "architectures/xlm_roberta",
        prefixes: &["roberta."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"output_past": true, "position_embedding_type": "absolute"}"#,
        needed: "embeddings.position_embeddings.weight",
        of_head: "classifier.out_proj.weight",
        foreign: "encoder.layer.0.attention.self.query.parametrizations.weight.0.lora_A",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"xlm-roberta-xl\""),
            ("model_type", "\"xmod\""),
            ("position_embedding_type", "\"rotary\""), // jina-embeddings-v3
        ],
    },
    Row {
        folder: "architectures/camembert",
        prefixes: &["roberta."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"output_past": true}"#,
        needed: "embeddings.token_type_embeddings.weight",
        of_head: "qa_outputs.weight",
        foreign: "encoder.layer.0.output.adapters.x.adapter_up.weight",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[],
        refused: &[("model_type", "\"flaubert\"")],
    },
    Row {
        folder: "architectures/mpnet",
        prefixes: &["mpnet."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"gradient_checkpointing": false, "type_vocab_size": 2}"#,
        needed: "encoder.relative_attention_bias.weight",
        of_head: "classifier.dense.weight",
        foreign: "embeddings.token_type_embeddings.weight",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[GAMMA_BETA],
        refused: &[("relative_attention_num_buckets", "64")],
    },
    Row {
        folder: "architectures/distilbert",
        prefixes: &["distilbert."],
        spellings: &[
            GAMMA_BETA,
            ("the keys hidden_size, num_hidden_layers, …", |c| c.rename_keys(DISTILBERT_KEYS)),
            ("dim and hidden_size", |c| {
                c.set_config("hidden_size", json!(20));
            }),
            ("dim 8 and hidden_size 20", |c| {
                c.set_config("dim", json!(8)).set_config("hidden_size", json!(20));
            }),
        ],
        other_keys: r#"{"tie_weights_": true, "sinusoidal_pos_embds": true, "hidden_act": "relu"}"#,
        needed: "transformer.layer.0.ffn.lin1.weight",
        of_head: "pre_classifier.weight",
        foreign: "embeddings.token_type_embeddings.weight",
        lm_head: ["vocab_projector", "vocab_projector"],
        lm_spellings: &[],
        refused: &[
            ("activation", "\"swiglu\""),
            ("model_type", "\"mobilebert\""),
            ("position_embedding_type", "\"relative_key\""),
        ],
    },
    Row {
        folder: "architectures/electra",
        prefixes: &["electra."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"summary_activation": "relu", "summary_use_proj": false}"#,
        needed: "embeddings.word_embeddings.weight",
        of_head: "discriminator_predictions.dense.weight",
        foreign: "encoder.layer.0.attention.conv_kernel_layer.weight",
        lm_head: ["generator_lm_head", "generator_lm_head"],
        lm_spellings: &[GAMMA_BETA],
        refused: &[("model_type", "\"convbert\"")],
    },
    Row {
        folder: "architectures/albert",
        prefixes: &["albert."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0,
            "num_memory_blocks": 0, "layers_to_keep": []}"#,
        needed: "encoder.albert_layer_groups.0.albert_layers.0.ffn_output.weight",
        of_head: "sop_classifier.classifier.weight",
        foreign: "encoder.albert_layer_groups.1.albert_layers.0.ffn.weight",
        lm_head: ["predictions.decoder", "predictions"],
        lm_spellings: &[GAMMA_BETA],
        refused: &[("num_hidden_groups", "2"), ("inner_group_num", "2")],
    },
    Row {
        folder: "architectures/modernbert",
        prefixes: &["model."],
        spellings: &[
            ("the keys layer_types and rope_parameters", current_modernbert_keys),
            ("sliding_window instead of local_attention", |c| {
                c.config.as_object_mut().unwrap().remove("local_attention");
                c.set_config("sliding_window", json!(3)); // half of local_attention
            }),
            ("sliding_window and another local_attention", |c| {
                c.set_config("local_attention", json!(2)).set_config("sliding_window", json!(3));
            }),
        ],
        other_keys: r#"{"position_embedding_type": "sans_pos", "causal_mask": false,
            "reference_compile": true, "repad_logits_with_grad": true, "layer_norm_eps": 1}"#,
        needed: "layers.0.attn.Wqkv.weight",
        of_head: "head.dense.weight",
        foreign: "layers.0.attn_norm.weight",
        lm_head: ["decoder", "decoder"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"modernvbert\""),
            ("rope_parameters", r#"{"full_attention": {"rope_type": "longrope", "factor": 4}}"#),
            ("rope_parameters", r#"{"rope_type": "default", "rope_theta": 10000}"#),
            ("global_attn_every_n_layers", "0"),
            ("rope_parameters", r#"{"sliding_attention": {"rope_type": "longrope", "factor": 4}}"#),
            ("rope_scaling", r#"{"rope_type": "linear", "factor": 4}"#),
            ("layer_types", r#"["full_attention", "chunked_attention"]"#),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
            ("classifier_pooling", "\"max\""),
        ],
    },
    Row {
        folder: "architectures/nomic_bert",
        prefixes: &["bert.", "nomic_bert."],
        spellings: &[
            ("the current names", |c| c.translate(NOMIC_NAMES, NOMIC_FUSED, false)),
            ("the current names, with nomic_bert.", |c| {
                c.translate(NOMIC_NAMES, NOMIC_FUSED, false);
                c.add_prefix("nomic_bert.");
            }),
            ("the current keys", |c| {
                c.rename_keys(NOMIC_KEYS);
                for key in ["activation_function", "auto_map", "rotary_emb_base"] {
                    c.config.as_object_mut().unwrap().remove(key);
                }
                c.set_config("vocab_size", json!(48));
                let rope = json!({"rope_type": "default", "rope_theta": 1000.0});
                c.set_config("rope_parameters", rope);
            }),
            ("the current keys beside the older keys", |c| {
                c.set_config("hidden_size", json!(20)).set_config("num_hidden_layers", json!(3));
                c.set_config("num_attention_heads", json!(5));
                c.set_config("intermediate_size", json!(28));
            }),
        ],
        other_keys: r#"{"use_flash_attn": true, "fused_bias_fc": true, "use_xentropy": true,
            "dense_seq_output": true, "reorder_and_upcast_attn": false, "summary_type": "cls_index"}"#,
        needed: "encoder.layers.0.attn.Wqkv.weight",
        of_head: "cls.predictions.bias",
        foreign: "encoder.layers.0.mlp.router.layer.weight",
        lm_head: ["cls.predictions.decoder", "cls.predictions"],
        lm_spellings: &[("the older names", |c| {
            c.translate(NOMIC_NAMES, NOMIC_FUSED, true);
            c.rename_tensors(|name| name.replace("nomic_bert.", "bert."));
        })],
        refused: &[
            ("num_experts", "8"),
            ("moe_every_n_layers", "2"),
            ("prenorm", "true"),
            ("use_rms_norm", "true"),
            ("rotary_emb_fraction", "0.5"),
            ("rotary_emb_interleaved", "true"),
            ("mlp_fc1_bias", "true"),
            ("activation_function", "\"gelu\""),
        ],
    },
    Row {
        folder: "architectures/gte",
        prefixes: &["new.", "gte."],
        spellings: &[
            GAMMA_BETA,
            ("the current names", |c| {
                c.translate(GTE_NAMES, GTE_FUSED, false);
            }),
        ],
        other_keys: r#"{"unpad_inputs": "true", "use_memory_efficient_attention": "true",
            "logn_attention_clip1": true}"#,
        needed: "encoder.layer.0.mlp.up_gate_proj.weight",
        of_head: "classifier.weight",
        foreign: "encoder.layer.0.attention.q_proj.weight",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[("the older names", |c| {
            c.translate(GTE_NAMES, GTE_FUSED, true);
            c.rename_tensors(|name| name.replace("gte.", "new."));
        })],
        refused: &[
            ("model_type", "\"qwen2_vl\""), // gme-Qwen2-VL
            ("logn_attention_scale", "true"),
            ("layer_norm_type", "\"rms_norm\""),
            ("position_embedding_type", "\"absolute\""),
            ("pack_qkv", "false"),
            ("rope_scaling", r#"{"type": "ntk", "factor": 8, "mixed_b": 0.75}"#),
            ("rope_scaling", r#"{"type": "longrope", "factor": 8}"#),
        ],
    },
    Row {
        folder: "architectures/gte_no_types",
        prefixes: &["gte.", "new."],
        spellings: &[
            ("the current names, with gte.", |c| {
                c.translate(GTE_NAMES, GTE_FUSED, false);
                c.add_prefix("gte.");
            }),
            ("the older keys", |c| {
                c.config.as_object_mut().unwrap().remove("rope_parameters");
                c.set_config("model_type", json!("new")).set_config("rope_theta", json!(160_000));
                c.set_config("position_embedding_type", json!("rope"));
            }),
        ],
        other_keys: r#"{"rope_theta": 7}"#,
        needed: "encoder.layer.0.attention.qkv_proj.bias",
        of_head: "qa_outputs.weight",
        foreign: "embeddings.token_type_embeddings.weight",
        lm_head: ["lm_head.decoder", "lm_head"],
        lm_spellings: &[("the current names", |c| {
            c.translate(GTE_NAMES, GTE_FUSED, false);
            c.rename_tensors(|name| name.replace("new.", "gte."));
        })],
        refused: &[("rope_parameters", r#"{"rope_type": "longrope", "factor": 8}"#)],
    },
    Row {
        folder: "architectures/jina_bert",
        prefixes: &["bert."],
        spellings: &[GAMMA_BETA],
        other_keys: r#"{"attn_implementation": "torch", "emb_pooler": "cls", "hidden_act": "tanh",
            "model_max_length": 8192, "auto_map": {"AutoModel":
            "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel", "AutoModelForMaskedLM":
            "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM"}}"#,
        needed: "encoder.layer.0.mlp.gated_layers.weight",
        of_head: "cls.predictions.bias",
        foreign: "encoder.layer.0.attention.self.layer_norm_q.weight",
        lm_head: ["cls.predictions.decoder", "cls.predictions"],
        lm_spellings: &[GAMMA_BETA],
        refused: &[
            (
                "auto_map",
                r#"{"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}"#,
            ),
            ("feed_forward_type", "\"mlp\""),
            ("position_embedding_type", "\"absolute\""),
            ("alibi_starting_size", "512"), // MosaicML's BERT
        ],
    },
    Row {
        folder: "architectures/deberta",
        prefixes: &["deberta."],
        spellings: &[
            GAMMA_BETA,
            ("pos_att_type as a string", |c| {
                c.set_config("pos_att_type", json!("P2C|c2p"));
            }),
        ],
        other_keys: r#"{"attention_head_size": 4, "conv_kernel_size": 0, "pooler_dropout": 1,
            "embedding_size": 20, "legacy": false}"#,
        needed: "encoder.rel_embeddings.weight",
        of_head: "mask_predictions.dense.weight",
        foreign: "encoder.conv.conv.weight",
        lm_head: ["cls.predictions.decoder", "cls.predictions"],
        lm_spellings: &[
            GAMMA_BETA,
            ("the names of v3", |c| {
                c.rename_tensors(|name| {
                    let name =
                        name.replace("cls.predictions.transform.", "lm_predictions.lm_head.");
                    name.replace("cls.predictions.", "lm_predictions.lm_head.")
                });
            }),
        ],
        refused: &[
            ("model_type", "\"deberta\""), // v1
            ("relative_attention", "false"),
            ("max_relative_positions", "4611686018427387905"),
            ("max_position_embeddings", "1099511627776"),
            ("conv_kernel_size", "3"), // v2-xlarge
            ("share_att_key", "false"),
            ("share_att_key", "null"),
            ("embedding_size", "12"),
            ("attention_head_size", "8"),
            ("pooler_hidden_size", "12"),
        ],
    },
    Row {
        folder: "decoders/qwen3",
        prefixes: &["model."],
        spellings: &[("the key rope_parameters", current_rope_keys)],
        other_keys: r#"{"max_window_layers": 28, "sliding_window": null, "use_cache": true,
            "layer_types": ["full_attention", "full_attention"], "attention_dropout": 0.1}"#,
        needed: "layers.0.self_attn.q_norm.weight",
        of_head: "lm_head.weight",
        foreign: "layers.0.mlp.experts.0.gate_proj.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[("the key rope_parameters", current_rope_keys)],
        refused: &[
            ("model_type", "\"qwen3_moe\""),
            ("model_type", "\"qwen3_next\""),
            ("model_type", "\"qwen3_vl\""),
            ("rope_scaling", r#"{"rope_type": "longrope", "factor": 4}"#),
            ("partial_rotary_factor", "0.5"),
            ("use_sliding_window", "1"),
            ("layer_types", r#"["full_attention", "linear_attention"]"#),
            ("layer_types", r#"["full_attention"]"#),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
        ],
    },
    Row {
        folder: "decoders/qwen2",
        prefixes: &["model."],
        spellings: &[("the key rope_parameters", current_rope_keys)],
        other_keys: r#"{"max_window_layers": 21, "sliding_window": 32768, "use_cache": true,
            "use_sliding_window": false, "torch_dtype": "bfloat16"}"#,
        needed: "layers.0.self_attn.q_proj.bias",
        of_head: "score.weight",
        foreign: "layers.0.self_attn.q_norm.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"qwen2_moe\""),
            ("model_type", "\"qwen2_vl\""),
            ("rope_parameters", r#"{"rope_type": "longrope", "rope_theta": 500, "factor": 4}"#),
            ("rope_scaling", r#"{"type": "mrope", "mrope_section": [16, 24, 24]}"#),
        ],
    },
    Row {
        folder: "decoders/llama",
        prefixes: &["model."],
        spellings: &[("the key rope_parameters", current_rope_keys)],
        other_keys: r#"{"pretraining_tp": 1, "mlp_bias": false, "attention_bias": false,
            "use_cache": true, "num_labels": 1}"#,
        needed: "norm.weight",
        of_head: "lm_head.weight",
        foreign: "layers.0.self_attn.q_proj.lora_A.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"llama4_text\""),
            ("model_type", "\"lfm2\""),
            ("rope_scaling", r#"{"rope_type": "llama3", "factor": 8}"#),
            ("num_key_value_heads", "4"),
        ],
    },
    Row {
        folder: "decoders/mistral",
        prefixes: &["model."],
        spellings: &[
            ("the key rope_parameters", current_rope_keys),
            ("head_dim null", |c| {
                c.set_config("head_dim", Value::Null);
            }),
        ],
        other_keys: r#"{"use_cache": true, "bos_token_id": 1}"#,
        needed: "layers.0.mlp.gate_proj.weight",
        of_head: "score.weight",
        foreign: "layers.0.block_sparse_moe.gate.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"mixtral\""),
            ("model_type", "\"ministral\""),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
            ("sliding_window", "0"),
        ],
    },
    Row {
        folder: "decoders/eurobert",
        prefixes: &["model."],
        spellings: &[("the key rope_parameters", current_rope_keys)],
        other_keys: r#"{"clf_pooling": "late", "mask_token": "<|mask|>", "use_cache": false,
            "auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel",
            "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM"}}"#,
        needed: "embed_tokens.weight",
        of_head: "lm_head.weight",
        foreign: "layers.0.self_attn.k_norm.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[],
        refused: &[
            ("model_type", "\"modernvbert\""),
            ("classifier_pooling", "\"max\""),
            ("rope_scaling", r#"{"rope_type": "longrope", "factor": 4}"#),
        ],
    },
    Row {
        folder: "decoders/gemma3",
        prefixes: &["model."],
        spellings: &[("the keys layer_types and rope_parameters", current_gemma_keys)],
        other_keys: r#"{"attn_logit_softcapping": 50, "cache_implementation": "hybrid",
            "use_bidirectional_attention": false}"#,
        needed: "layers.0.pre_feedforward_layernorm.weight",
        of_head: "score.weight",
        foreign: "layers.0.self_attn.v_norm.weight",
        lm_head: ["lm_head", "lm_head"],
        lm_spellings: &[("the current keys", current_gemma_keys)],
        refused: &[
            ("model_type", "\"gemma2\""),
            ("model_type", "\"gemma3\""), // has images
            ("model_type", "\"embedding_gemma2\""),
            ("sliding_window_pattern", "0"),
            ("rope_parameters", r#"{"full_attention": {"rope_type": "longrope", "factor": 4}}"#),
            ("layer_types", r#"["full_attention", "sliding_attention"]"#),
        ],
    },
    Row {
        folder: "decoders/modernbert_decoder",
        prefixes: &["model."],
        spellings: &[("the keys layer_types and rope_parameters", current_modernbert_keys)],
        other_keys: r#"{"position_embedding_type": "sans_pos", "causal_mask": true,
            "sliding_window": 2, "reference_compile": true}"#,
        needed: "layers.0.attn.q_proj.weight",
        of_head: "lm_head.dense.weight",
        foreign: "layers.0.attn.Wqkv.weight",
        lm_head: ["decoder", "decoder"],
        lm_spellings: &[],
        refused: &[
            ("global_attn_every_n_layers", "0"),
            ("rope_parameters", r#"{"rope_type": "default", "rope_theta": 10000}"#),
            ("layer_types", r#"["full_attention", "chunked_attention"]"#),
        ],
    },
];

const GAMMA_BETA: Change = ("LayerNorm.gamma and LayerNorm.beta", |c| {
    c.rename_tensors(|name| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        name.replace("LayerNorm.bias", "LayerNorm.beta")
    });
});

const DISTILBERT_KEYS: &[(&str, &str)] = &[
    ("dim", "hidden_size"),
    ("n_layers", "num_hidden_layers"),
    ("n_heads", "num_attention_heads"),
];

const NOMIC_KEYS: &[(&str, &str)] = &[
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_inner", "intermediate_size"),
    ("n_positions", "max_position_embeddings"),
    ("layer_norm_epsilon", "layer_norm_eps"),
];

/// Parts of older tensor names, each with the part that replaces it in the current name.
type Parts = &'static [(&'static str, &'static str)];
/// Fused modules of older checkpoints, each with the modules that replace it in current ones.
type Fused = &'static [(&'static str, &'static [&'static str])];

const NOMIC_NAMES: Parts = &[
    ("encoder.layers.", "layers."),
    ("emb_ln.", "embeddings.LayerNorm."),
    ("attn.out_proj.", "self_attn.o_proj."),
    ("mlp.fc11.", "mlp.up_proj."),
    ("mlp.fc12.", "mlp.gate_proj."),
    ("mlp.fc2.", "mlp.down_proj."),
    ("norm1.", "post_attention_layernorm."),
    ("norm2.", "post_mlp_layernorm."),
];
const NOMIC_FUSED: Fused =
    &[("attn.Wqkv", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])];

const GTE_NAMES: Parts = &[
    ("encoder.layer.", "layers."),
    ("attention.o_proj.", "self_attn.o_proj."),
    ("attn_ln.", "post_attention_layernorm."),
    ("mlp_ln.", "post_mlp_layernorm."),
    ("lm_head.norm.", "lm_head.layer_norm."),
];
const GTE_FUSED: Fused = &[
    ("attention.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("mlp.up_gate_proj", &["mlp.up_proj", "mlp.gate_proj"]),
];

/// `rope_parameters` instead of `rope_theta` and `rope_scaling`.
fn current_rope_keys(c: &mut Checkpoint) {
    let keys = c.config.as_object_mut().unwrap();
    let theta = keys.remove("rope_theta").unwrap();
    let mut rope = match keys.remove("rope_scaling") {
        Some(Value::Object(scaling)) => Value::Object(scaling),
        _ => json!({"rope_type": "default"}),
    };
    rope["rope_theta"] = theta;
    c.set_config("rope_parameters", rope);
}

fn current_gemma_keys(c: &mut Checkpoint) {
    let keys = c.config.as_object_mut().unwrap();
    let [every, global, local] = ["sliding_window_pattern", "rope_theta", "rope_local_base_freq"]
        .map(|key| keys.remove(key).unwrap());
    let scaling = keys.remove("rope_scaling");
    assert!(scaling.is_none_or(|scaling| scaling.is_null()));
    let (layers, every) = (keys["num_hidden_layers"].as_u64().unwrap(), every.as_u64().unwrap());
    let is_global = |i: u64| (i + 1).is_multiple_of(every);
    let types =
        (0..layers).map(|i| if is_global(i) { "full_attention" } else { "sliding_attention" });
    c.set_config("layer_types", types.collect());
    let rope = |theta: Value| json!({"rope_type": "default", "rope_theta": theta});
    let parameters = json!({"full_attention": rope(global), "sliding_attention": rope(local)});
    c.set_config("rope_parameters", parameters);
}

fn current_modernbert_keys(c: &mut Checkpoint) {
    let keys = c.config.as_object_mut().unwrap();
    let [every, global, local] =
        ["global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"]
            .map(|key| keys.remove(key).unwrap());
    let layers = keys["num_hidden_layers"].as_u64().unwrap();
    let every = every.as_u64().unwrap();
    let types =
        (0..layers).map(|i| if i % every == 0 { "full_attention" } else { "sliding_attention" });
    c.set_config("layer_types", types.collect());
    let rope = |theta: Value| json!({"rope_type": "default", "rope_theta": theta});
    let parameters = json!({"full_attention": rope(global), "sliding_attention": rope(local)});
    c.set_config("rope_parameters", parameters);
}

impl Checkpoint {
    fn add_prefix(&mut self, prefix: &str) {
        self.rename_tensors(|name| format!("{prefix}{name}"));
    }

    fn rename_keys(&mut self, names: &[(&str, &str)]) {
        let keys = self.config.as_object_mut().unwrap();
        for &(older, current) in names {
            let value = keys.remove(older).unwrap_or_else(|| panic!("the key {older} is absent"));
            keys.insert(current.to_string(), value);
        }
    }

    /// Splits the fused tensors and renames all tensors as in current checkpoints, or, with
    /// `to_older`, joins and renames them as in older ones.
    fn translate(&mut self, parts: Parts, fused: Fused, to_older: bool) {
        for &(whole, modules) in fused {
            if to_older { self.join(whole, modules) } else { self.split(whole, modules) }
        }
        self.rename_tensors(|name| {
            parts.iter().fold(name.to_string(), |name, &(older, current)| {
                if to_older { name.replace(current, older) } else { name.replace(older, current) }
            })
        });
    }

    /// Splits each tensor of a module `whole` along the first axis into tensors of `modules`.
    fn split(&mut self, whole: &str, modules: &[&str]) {
        for (name, tensor) in std::mem::take(&mut self.tensors) {
            if !name.contains(whole) {
                self.tensors.insert(name, tensor);
                continue;
            }
            let parts = tensor.chunk(modules.len(), 0).unwrap();
            for (module, part) in modules.iter().zip(parts) {
                self.tensors.insert(name.replace(whole, module), part);
            }
        }
    }

    /// Joins the tensors of `modules` along the first axis into a tensor of the module `whole`.
    fn join(&mut self, whole: &str, modules: &[&str]) {
        let firsts = self.tensors.keys().filter(|name| name.contains(modules[0]));
        for first in firsts.cloned().collect::<Vec<_>>() {
            let parts = modules.iter().map(|module| {
                let name = first.replace(modules[0], module);
                self.tensors.remove(&name).unwrap()
            });
            let parts: Vec<Tensor> = parts.collect();
            self.tensors.insert(first.replace(modules[0], whole), Tensor::cat(&parts, 0).unwrap());
        }
    }

    /// The same tensors, rounded to f16, in `dtype`.
    fn rounded(&self, dtype: DType) -> Self {
        let mut rounded = self.clone();
        for tensor in rounded.tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F16).unwrap().to_dtype(dtype).unwrap();
        }
        rounded
    }
}

/// Loads a model and computes its output.
type Run = fn(&ModelFiles, &Tensor) -> encoder::Result<(Vec<Tensor>, LoadReport)>;

/// The last hidden states, and the pooler's output if there is a pooler.
fn encoder(files: &ModelFiles, ids: &Tensor) -> encoder::Result<(Vec<Tensor>, LoadReport)> {
    let (model, report) = EncoderModel::from_files(files, &LoadOptions::default())?;
    let out = model.forward(ids, None, &AttentionMask::none())?;
    Ok((std::iter::once(out.last_hidden_state).chain(out.pooler_output).collect(), report))
}

fn masked_lm(files: &ModelFiles, ids: &Tensor) -> encoder::Result<(Vec<Tensor>, LoadReport)> {
    let (model, report) = EncoderForMaskedLm::from_files(files, &LoadOptions::default())?;
    Ok((vec![model.forward(ids, None, &AttentionMask::none())?], report))
}

fn causal_lm(files: &ModelFiles, ids: &Tensor) -> encoder::Result<(Vec<Tensor>, LoadReport)> {
    let (model, report) = CausalLm::from_files(files, &LoadOptions::default())?;
    Ok((vec![model.forward(ids, None, None)?], report))
}

fn classifier(files: &ModelFiles, ids: &Tensor) -> encoder::Result<(Vec<Tensor>, LoadReport)> {
    let (model, report) =
        EncoderForSequenceClassification::from_files(files, &LoadOptions::default())?;
    Ok((vec![model.forward(ids, None, &AttentionMask::none())?], report))
}

/// Compares the outputs of `run` for `c` and for `expected`, and describes the load report of `c`.
fn check(run: Run, c: &Checkpoint, expected: &Checkpoint) -> Outcome {
    let ids = Tensor::new(&[[7u32, 40, 23, 5, 11, 30, 36, 9]], &Cpu)?;
    let (got, report) = run(&c.files(), &ids)?;
    let (expected, _) = run(&expected.files(), &ids)?;
    anyhow::ensure!(got.len() == expected.len(), "{} outputs", got.len());
    let mut largest = 0f64;
    for (got, expected) in got.iter().zip(&expected) {
        largest = largest.max(max_difference(got, expected)?);
    }
    let outcome =
        if largest == 0.0 { "same bits".to_string() } else { format!("differs by {largest:.1e}") };
    Ok(outcome + &describe(&report))
}

#[test]
fn every_architecture_of_the_golden_models_has_a_row() -> anyhow::Result<()> {
    let encoders = architectures()?.into_iter();
    let encoders = encoders.map(|model| (format!("architectures/{}", model.folder), model.name));
    let decoders = decoders()?.into_iter();
    let decoders = decoders.map(|model| (format!("decoders/{}", model.folder), model.architecture));
    let golden: Vec<(String, String)> = encoders.chain(decoders).collect();
    let with_row = golden.iter().filter(|(folder, _)| ROWS.iter().any(|row| row.folder == folder));
    let with_row: BTreeSet<&str> = with_row.map(|(_, name)| &name[..]).collect();
    assert_eq!(with_row, golden.iter().map(|(_, name)| &name[..]).collect());
    Ok(())
}

pub(super) fn cases(t: &mut Table) {
    for row in &ROWS {
        t.section(row.folder);
        encoders(t, row);
        heads(t, row);
        refused(t, row);
    }
    decoder_folders(t);
}

/// Folders of decoders that embed and rank, with their tokenizers and modules.
fn decoder_folders(t: &mut Table) {
    t.section("folders of decoders");
    for folder in ["eurobert", "gemma", "llama", "mistral", "qwen3"] {
        let folder = format!("decoders/sentences/{folder}");
        t.case(&folder, |_| inspect_files(&ModelFiles::dir(support::golden(&folder))?));
    }
    for folder in ["qwen3", "true_only", "no_template", "sequence", "sequence_no_template"] {
        let folder = format!("decoders/rerank/{folder}");
        t.case(&folder, |_| inspect_files(&ModelFiles::dir(support::golden(&folder))?));
    }
    let reranker = Checkpoint::golden_folder("decoders/rerank/qwen3");
    let mut case = |name: &str, change: &dyn Fn(&mut Checkpoint)| {
        t.case_from(reranker.clone(), name, |c| {
            change(c);
            inspect(c)
        });
    };
    case("a reranker without modules.json", &|c| {
        c.remove_file("modules.json").remove_file("sentence_bert_config.json");
    });
    case("a reranker without chat_template.jinja", &|c| {
        c.remove_file("chat_template.jinja");
    });
    case("a template of roles user and assistant", &|c| {
        let template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
        c.set_file("chat_template.jinja", template);
    });
    case("true_token_id outside the vocabulary", &|c| {
        c.set_file("1_LogitScore/config.json", r#"{"true_token_id": 605}"#);
    });
    case("a LogitScore of a model that is not causal", &|c| {
        c.set_config("is_causal", json!(false));
    });
    case("an adapter", &|c| {
        c.set_file("adapter_config.json", r#"{"peft_type": "LORA"}"#);
    });
    let embedder = Checkpoint::golden_folder("decoders/sentences/qwen3");
    t.case_from(embedder, "an embedder with a module of custom code", |c| {
        inspect(c.add_module_of("custom_modules.WeightedPooling", "3_WeightedPooling"))
    });
    let golden = Checkpoint::golden("decoders/qwen3_bidirectional/encoder");
    t.case_from(golden.clone(), "the config of pplx-embed", |c| {
        c.config.as_object_mut().unwrap().remove("is_causal").unwrap();
        c.set_config("model_type", json!("bidirectional_pplx_qwen3"));
        c.set_config("auto_map", json!({"AutoModel": "modeling.PPLXQwen3Model"}));
        check(encoder, c, &golden)
    });
}

fn encoders(t: &mut Table, row: &Row) {
    let golden = Checkpoint::golden(&format!("{}/encoder", row.folder));
    let mut case = |name: &str, change: &dyn Fn(&mut Checkpoint)| {
        t.case_from(golden.clone(), name, |c| {
            change(c);
            check(encoder, c, &golden)
        });
    };
    for prefix in row.prefixes {
        case(&format!("prefix {prefix}"), &|c| c.add_prefix(prefix));
        case(&format!("prefix module.{prefix}"), &|c| c.add_prefix(&format!("module.{prefix}")));
    }
    case("prefix 0.auto_model.", &|c| c.add_prefix("0.auto_model."));
    for (name, change) in row.spellings {
        case(name, &|c| change(c));
    }
    case("other keys of published configs", &|c| {
        let keys: Value = serde_json::from_str(row.other_keys).unwrap();
        for (key, value) in keys.as_object().unwrap() {
            c.set_config(key, value.clone());
        }
    });
    case("two shards with an index", &|c| weight_files::shard(c));
    case("a tensor of a head", &|c| {
        c.add_prefix(row.prefixes[0]);
        c.set_zeros(row.of_head, &[20]);
    });
    case("a buffer of positions", &|c| {
        let is_decoder = row.folder.starts_with("decoders/");
        let rotary = "layers.0.self_attn.rotary_emb.inv_freq"; // in older files
        c.set_zeros(if is_decoder { rotary } else { "embeddings.position_ids" }, &[1, 21]);
    });
    case("a tensor of a similar model", &|c| {
        c.set_zeros(row.foreign, &[20]);
    });
    case("a missing tensor", &|c| {
        c.tensors.remove(row.needed).expect(row.needed);
    });
    case("a tensor with the wrong shape", &|c| {
        assert!(c.tensors.contains_key(row.needed));
        c.set_zeros(row.needed, &[7, 20]);
    });
    t.case_from(golden.rounded(DType::F16), "f16 weights", |c| {
        check(encoder, c, &golden.rounded(DType::F32))
    });
    t.case_from(golden.clone(), "inspection", |c| inspect(c));
}

fn heads(t: &mut Table, row: &Row) {
    let models: [(&str, &str, Run); 3] = [
        ("masked_lm", "masked LM", masked_lm),
        ("causal_lm", "causal LM", causal_lm),
        ("sequence", "classifier", classifier),
    ];
    for (kind, model, run) in models {
        // A model has one of the two language models.
        if !support::golden(row.folder).join(kind).exists() {
            continue;
        }
        let golden = Checkpoint::golden(&format!("{}/{kind}", row.folder));
        let mut case = |name: &str, change: &dyn Fn(&mut Checkpoint)| {
            t.case_from(golden.clone(), &format!("{model}, {name}"), |c| {
                change(c);
                check(run, c, &golden)
            });
        };
        case("no prefix", &|c| {
            c.rename_tensors(|name| {
                let found = row.prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
                found.unwrap_or(name).to_string()
            });
        });
        case("module. before every name", &|c| c.add_prefix("module."));
        if kind == "sequence" {
            continue;
        }
        for (name, change) in row.lm_spellings {
            case(name, &|c| change(c));
        }
        let [decoder, bias] = row.lm_head;
        let output = format!("{decoder}.weight");
        if !golden.tensors.contains_key(&output) {
            case("a copy of the word embeddings", &|c| {
                let words = c.tensors.iter().find(|(name, _)| {
                    ["word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight"]
                        .iter()
                        .any(|end| name.ends_with(end))
                });
                let words = words.unwrap().1.clone();
                c.tensors.insert(output.clone(), words);
            });
        }
        if decoder != bias {
            case("the other name of its bias", &|c| {
                let names = [decoder, bias].map(|module| format!("{module}.bias"));
                let found = names.iter().position(|name| c.tensors.contains_key(name)).unwrap();
                let bias = c.tensors.remove(&names[found]).unwrap();
                c.tensors.insert(names[1 - found].clone(), bias);
            });
        }
    }
}

fn refused(t: &mut Table, row: &Row) {
    let golden = Checkpoint::golden(&format!("{}/encoder", row.folder));
    for (key, value) in row.refused.iter().chain(&REFUSED_BY_ALL) {
        let parsed: Value = serde_json::from_str(value).unwrap();
        let mut name = format!("{key} {value}");
        if name.len() > 48 {
            name.truncate(47);
            name.push('…');
        }
        t.case_from(golden.clone(), &name, |c| check(encoder, c.set_config(key, parsed), &golden));
    }
}
