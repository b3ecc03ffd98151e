"""What mkdocs.yml cannot say: the pages outside of docs/, the printed API, and links to files that the site does not have."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = {  # pages by their place in the site
    "README.md": "README.md",  # in place of docs/README.md, whose table the navigation is
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "recipes.md": "recipes/README.md",
}
API = {  # pages of names below fw_fairseq
    "operation": ("The operation", "ops.fast_weight ops.FastWeightState accelerate"),
    "layers": (
        "Layers",
        "mixers.Mixer mixers.FastWeight mixers.Additive mixers.Leap mixers.Sru mixers.Srupp mixers.LocalAttention"
        " mixers.TransformerXl mixers.Linformer mixers.Abc mixers.options.MixerOptions",
    ),
    "rules": ("Rules and feature maps", "rules.Rule rules.Gate rules.Coefficients feature_maps"),
    "models": (
        "Models, tasks and losses",
        "models.FastWeightLanguageModel models.FastWeightTransformer models.PretrainedLanguageModel models.RetrievalModel"
        " tasks.StatefulLanguageModelingTask tasks.SlidingLanguageModelingTask tasks.AssociativeRetrievalTask tasks.MqarTask"
        " tasks.StateTrackingTask criterions.FastWeightCrossEntropy criterions.FastWeightLabelSmoothedCrossEntropy"
        " criterions.T2rDistillation",
    ),
}
MEMBERS = {  # of the others the docstring says it
    "mixers.Mixer": ["read_settings", "forward", "state_size"],
    "feature_maps": ["FeatureMap", "Elementwise", "RowMap", "sum_normalise", "l2_normalise"],
}
BOOST = {
    "tutorials": 4,
    "howto": 4,
    "rules.md": 4,
    "results": 0.3,
    "changelog.md": 0.3,
    "contributing.md": 0.3,
    "fairseq_changes.md": 0.3,
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([\w./-]*)(#[\w-]+)?\)")


def on_files(files, config):
    """Adds the pages."""
    for place, source in OUTSIDE.items():
        if place in files.src_uris:
            files.remove(files.src_uris[place])
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for name, (title, members) in API.items():
        blocks = (f"::: fw_fairseq.{member}\n    options: {{members: {MEMBERS.get(member, [])}}}" for member in members.split())
        files.append(File.generated(config, f"api/{name}.md", content="\n\n".join([f"# {title}", *blocks])))
    return files


def on_page_markdown(markdown, page, config, files):
    """Lets links lead to the site's pages, or to the repository where mkdocs.yml knows it; the others become text. A search finds
    pages to do something with before reports."""
    page.meta["search"] = {"boost": BOOST.get(page.file.src_uri.partition("/")[0], 1)}
    source = ROOT / OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    places = {ROOT / path: place for place, path in OUTSIDE.items()} | {ROOT / "docs" / "README.md": "README.md"}
    own = (file.src_uri for file in files if file.inclusion.is_included() and not file.generated_by)
    places |= {ROOT / "docs" / place: place for place in own}

    def changed(found):
        image, text, path, anchor = found.groups()
        target = Path(os.path.normpath(source.parent / path)) if path else source
        if target in places:
            place = os.path.relpath(places[target], os.path.dirname(page.file.src_uri) or ".") if path else ""
            return f"{image}[{text}]({place}{anchor or ''})"
        if config.repo_url:
            return f"{image}[{text}]({config.repo_url}/blob/HEAD/{target.relative_to(ROOT)}{anchor or ''})"
        return text

    parts = re.split(r"(^```.*?^```|`[^`\n]+`(?!\]))", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(changed, part) for number, part in enumerate(parts))


def on_page_content(html, **unused):
    """In a table GitHub needs a backslash before a bar, also in code."""
    return html.replace("\\|", "|")
