// A link to the same page in the other language, and a search that finds Chinese words. Without scripts both are missing, and nothing else is.
"use strict";

(() => {
    const [here, there, name] = document.documentElement.lang.startsWith("zh") ? ["/zh/", "/en/", "English"] : ["/en/", "/zh/", "中文"];
    const buttons = document.querySelector(".right-buttons");
    const at = location.pathname.lastIndexOf(here);
    if (buttons && at >= 0) {
        const link = document.createElement("a");
        link.href = location.pathname.slice(0, at) + there + location.pathname.slice(at + here.length);
        link.lang = there === "/zh/" ? "zh-CN" : "en";
        link.textContent = name;
        link.className = "language";
        buttons.prepend(link);
    }
})();

// The index of mdBook has no words of languages without spaces. Its texts are all there, so a query with Chinese characters looks for each of
// its words in them: first in headings, then by how often they occur.
(() => {
    if (!window.elasticlunr) {
        return;
    }
    const load = elasticlunr.Index.load;
    const count = (text, word) => text.split(word).length - 1;
    const found = (documents, words) => {
        const results = [];
        for (const [ref, document] of Object.entries(documents)) {
            const title = document.title.toLowerCase();
            const body = document.body.toLowerCase();
            const scores = words.map((word) => 20 * count(title, word) + Math.min(count(body, word), 10));
            if (scores.every((score) => score > 0)) {
                const first = Math.max(0, body.indexOf(words[0]) - 30);
                const teaser = document.body.slice(first, first + 100);
                const score = scores.reduce((a, b) => a + b);
                results.push({ ref, score, doc: { ...document, body: teaser } });
            }
        }
        return results.sort((a, b) => b.score - a.score);
    };
    elasticlunr.Index.load = (data) => {
        const index = load.call(elasticlunr.Index, data);
        const search = index.search.bind(index);
        index.search = (query, options) =>
            /\p{Script=Han}/u.test(query)
                ? found(index.documentStore.docs, query.toLowerCase().split(/\s+/).filter(Boolean))
                : search(query, options);
        return index;
    };
})();
