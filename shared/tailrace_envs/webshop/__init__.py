"""WebShop: find and buy the product that an instruction describes, by `search[...]` and `click[...]`.

After Yao et al. 2022, "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language
Agents" (arXiv:2207.01206). `catalogue` is the file format, `public` reads the published data,
`generated` makes small catalogues, `goals` what is asked for, `scoring` the published reward,
`search` the search engine, `pages` what is shown, `environment` the episode, `expert` and `tokenizer`
what a tiny model needs.
"""
