/* The script that both pages share. */

const byId = (id) => document.getElementById(id);

/** Creates an element. `props` are properties, or attributes where the name contains a "-" or is "role". */
function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

/** The API key of this tab. It is kept in the session storage, or until the page is closed if the browser
 * blocks the storage. */
const apiKey = {
  name: "encodle-api-key",
  value: "",
  /** Whether a header can hold `key`. */
  isValid: (key) => /^[\x20-\x7e]*$/.test(key),
  invalid: "The key has a control character or a character that is not ASCII: expected printable ASCII characters.",
  get() {
    try {
      this.value = sessionStorage.getItem(this.name) ?? "";
    } catch {}
    return this.isValid(this.value) ? this.value : "";
  },
  set(key) {
    this.value = key;
    try {
      sessionStorage.setItem(this.name, key);
    } catch {}
  },
};
