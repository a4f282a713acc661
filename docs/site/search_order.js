// Sphinx's order of what a search finds, but that pages come before what lists or cites them: decisions, tables, the
// changelog, every option. (`var`, since Sphinx's own script asks whether there is one.)
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    /^(docs\/decisions\/|results\/|docs\/commands$|docs\/messages$|CHANGELOG$)/.test(page) ? score / 8 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
