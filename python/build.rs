//! Linker arguments for extension modules on macOS, so that `cargo build` links the module as maturin
//! does.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
