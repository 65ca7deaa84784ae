"""WebShop: find and buy the product that an instruction describes, by `search[...]` and `click[...]`.

After Yao et al. 2022, "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language
Agents" (arXiv:2207.01206). `catalogue` defines the file format, `public` reads the published data,
`generated` makes small catalogues, `goals` the tasks, `scoring` computes the published reward, `shop`
searches, `pages` renders pages, `environment` plays episodes; `expert` and `tokenizer` serve tiny
models.
"""
