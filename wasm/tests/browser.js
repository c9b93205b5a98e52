// Headless Chromium, and a server of the repository's files for it.

import { createServer } from "node:http";
import { readFile, readdir } from "node:fs/promises";
import { dirname, extname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm" };

/** The paths of all files in folders of the repository. */
export const filesOf = async (...folders) => {
  const files = [];
  for (const folder of folders) {
    for (const entry of await readdir(join(ROOT, folder), { recursive: true, withFileTypes: true })) {
      if (entry.isFile()) files.push(join(entry.parentPath ?? entry.path, entry.name).slice(ROOT.length + 1));
    }
  }
  return files;
};

/** Opens a page; `folders` maps the beginnings of URLs to folders. `requests` and `served` are what the
 * browser asked for and got. */
export const open = async (folders = { "/": ROOT }) => {
  const served = new Map(); // the number of bytes of each path
  const server = createServer(async ({ url }, response) => {
    const path = decodeURIComponent(new URL(url, "http://localhost").pathname);
    const prefix = Object.keys(folders).filter((start) => path.startsWith(start)).sort((a, b) => b.length - a.length)[0];
    try {
      const bytes = await readFile(join(folders[prefix], path.slice(prefix.length)));
      served.set(path, bytes.length);
      response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(bytes);
    } catch (error) {
      response.writeHead(404).end(error.message);
    }
  });
  await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  });
  const page = await (await browser.newContext()).newPage();
  const address = `http://127.0.0.1:${server.address().port}`;
  const requests = [];
  page.context().on("request", (request) => requests.push(request.url()));
  const close = async () => {
    await browser.close();
    server.close();
  };
  return { page, address, requests, served, close };
};
