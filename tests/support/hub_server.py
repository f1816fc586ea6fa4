"""A small Hugging Face hub on loopback, of the routes that huggingface_hub asks: model info, the
tree of files, resolve with ETags and ranges, and what an upload needs."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
API = "/api/(?:models|datasets)/([^/]+/[^/]+)"


class Hub:
    """repositories: {org/name: {file: bytes}}. gated, private: names that need TOKEN. cut: files
    whose first download ends in the middle. requests: (method, path, range) of all so far."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]):
        self.repositories, self.gated, self.private = repositories, set(), set()
        self.cut: set[str] = set()
        self.requests: list[tuple[str, str, str | None]] = []

    def downloads(self) -> list[str]:
        """The names of the files that were downloaded, in order."""
        asked = [path for method, path, _ in self.requests if method == "GET"]
        return [path.rpartition("/")[2] for path in asked if "/resolve/" in path]


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve a hub within this block; gives its address, for HF_ENDPOINT."""

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.of.requests.append((self.command, path, self.headers["Range"]))
        if found := re.fullmatch(rf"{API}(?:/revision/(.+))?", path):
            if self._allowed(found[1], found[2] or "main"):
                self._json(self._info(found[1]))
        elif found := re.fullmatch(rf"{API}/tree/([^/]+)(/.*)?", path):
            if self._allowed(found[1], found[2]):
                everything = "recursive=true" in urlsplit(self.path).query.lower()
                self._json(self._tree(found[1], (found[3] or "").strip("/"), everything))
        elif found := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if self._allowed(found[1], found[2]):
                self._file(found[1], found[3])
        else:
            self._refuse(404, "EntryNotFound")

    def do_POST(self):
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.of.requests.append((self.command, path, None))
        if found := re.fullmatch(rf"{API}/paths-info/([^/]+)", path):
            if self._allowed(found[1], found[2]):
                self._json(self._paths(found[1], parse_qs(body.decode())["paths"]))
        elif self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._refuse(401, None)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.of.repositories.setdefault(name, {})
            self._json({"url": f"{self._address()}/{name}"})
        elif found := re.fullmatch(rf"{API}/preupload/main", path):
            files = json.loads(body)["files"]
            self._json(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        elif found := re.fullmatch(rf"{API}/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    content = base64.b64decode(value["content"])
                    self._files(found[1])[value["path"]] = content
            address = f"{self._address()}/{found[1]}/commit/{SHA}"
            self._json({"success": True, "commitOid": SHA, "commitUrl": address})
        else:
            self._json({})

    def _files(self, name: str) -> dict[str, bytes]:
        return self.of.repositories[name]

    def _address(self) -> str:
        return f"http://{self.headers['Host']}"

    def _allowed(self, name: str, revision: str) -> bool:
        """Refuse as the hub does, or return True."""
        has_token = self.headers["Authorization"] == f"Bearer {TOKEN}"
        if name not in self.of.repositories or (name in self.of.private and not has_token):
            self._refuse(401, "RepoNotFound")  # so it hides what is private
        elif name in self.of.gated and not has_token:
            self._refuse(401, "GatedRepo")
        elif revision not in ("main", "v1", SHA):
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _refuse(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _info(self, name: str) -> dict:
        siblings = [
            {"rfilename": file, "size": len(data)} for file, data in self._files(name).items()
        ]
        return {
            "_id": "0", "id": name, "modelId": name, "sha": SHA, "private": name in self.of.private,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
            "siblings": siblings,
        }  # fmt: skip

    def _entry(self, name: str, file: str) -> dict:
        data = self._files(name)[file]
        return {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}

    def _tree(self, name: str, folder: str, everything: bool) -> list[dict]:
        """The files of a folder, and the folders in it; or all the files below it."""
        begin = f"{folder}/" if folder else ""
        below = [file for file in self._files(name) if file.startswith(begin)]
        direct = {file[: (file + "/").index("/", len(begin))] for file in below}
        return self._paths(name, below if everything else sorted(direct))

    def _paths(self, name: str, paths: list[str]) -> list[dict]:
        """What there is at paths: files, and directories."""
        files = self._files(name)
        found = [self._entry(name, path) for path in paths if path in files]
        above = [path for path in paths if any(file.startswith(f"{path}/") for file in files)]
        return found + [{"type": "directory", "path": path, "oid": SHA} for path in above]

    def _file(self, name: str, file: str) -> None:
        data = self._files(name).get(file)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        asked = re.match(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, len(data)) if asked and asked[2] else len(data)
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        if file in self.of.cut:
            self.of.cut.remove(file)
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
        else:
            self.wfile.write(data[start:stop])
        return None


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
