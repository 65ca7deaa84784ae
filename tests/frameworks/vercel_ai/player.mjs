// Vercel AI SDK: plays one row from the command line and prints its answer.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [prompt, stream, api] = process.argv.slice(2);
const create = api === 'responses' ? createOpenAI : createOpenAICompatible;
const provider = create({
  name: 'tailrace',
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const double = tool({
  description: 'Twice a number.',
  inputSchema: z.object({ number: z.number().int() }),
  execute: async ({ number }) => 2 * number,
});
const call = {
  model: provider('policy'),
  system: 'Answer in digits.',
  prompt,
  tools: { double },
  stopWhen: stepCountIs(4),
};
const text = stream === 'true' ? await streamText(call).text : (await generateText(call)).text;
console.log(text);
