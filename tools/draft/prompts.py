"""Prompt material for distillation data: topics x templates, follow-up turns, raw-text openings
and code openings, plus the held-out evaluation prompts.

Everything is plain text. The chat format and the end tokens are those of SmolLM2: for a target
with others, change `chat`, `ASSISTANT_TURN`, `USER_TURN`, `END_TOKENS` and `TURN_END` here.
"""
import glob
import json
import os
import pathlib
import random
import sysconfig

# Ids after which a turn or a text is over, and the one that ends a turn that grows too long.
END_TOKENS = (0, 1, 2)
TURN_END = 2
# What comes between the end of a turn and the next one.
ASSISTANT_TURN = "\n<|im_start|>assistant\n"
USER_TURN = "\n<|im_start|>user\n"

TOPICS = """
photosynthesis|black holes|the water cycle|plate tectonics|volcanoes|earthquakes|the solar system|Mars|Jupiter|comets|the Big Bang|dark matter|neutron stars|gravity|magnetism|electricity|light|sound waves|lasers|semiconductors|transistors|batteries|solar panels|wind turbines|nuclear fusion|nuclear power|hydroelectric dams|steam engines|jet engines|electric cars|bicycles|helicopters|submarines|rockets|satellites|telescopes|microscopes|thermometers|DNA|genes|evolution|natural selection|bacteria|viruses|vaccines|antibiotics|the immune system|the heart|the lungs|the kidneys|the liver|the human brain|sleep|dreams|memory|stress|anxiety|meditation|yoga|running|swimming|weight lifting|nutrition|protein|vitamins|sugar|caffeine|coffee|tea|chocolate|bread|cheese|wine|olive oil|rice|pasta|pizza|soup|salad|curry|barbecue|baking|fermentation|gardening|compost|tomatoes|roses|trees|forests|rainforests|deserts|oceans|coral reefs|rivers|lakes|glaciers|mountains|islands|the Arctic|Antarctica|the Amazon|the Nile|the Sahara|climate change|recycling|pollution|biodiversity|endangered species|whales|dolphins|sharks|octopuses|penguins|eagles|owls|bees|ants|butterflies|spiders|snakes|frogs|turtles|dinosaurs|elephants|lions|tigers|wolves|bears|horses|cows|dogs|cats|parrots|goldfish|ancient Egypt|ancient Greece|the Roman Empire|the Middle Ages|the Renaissance|the Industrial Revolution|the French Revolution|the American Civil War|World War I|World War II|the Cold War|the Silk Road|the Vikings|the Aztecs|the Incas|the Ottoman Empire|the British Empire|the Great Wall of China|the pyramids|castles|knights|pirates|samurai|the printing press|paper|writing systems|the alphabet|mythology|philosophy|Stoicism|ethics|logic|democracy|constitutions|voting|human rights|law|courts|taxes|inflation|interest rates|stocks|bonds|mutual funds|budgeting|credit cards|mortgages|insurance|retirement savings|entrepreneurship|startups|marketing|advertising|branding|customer service|sales|negotiation|leadership|teamwork|project management|time management|productivity|remote work|job interviews|resumes|public speaking|writing essays|poetry|novels|short stories|science fiction|fantasy|fairy tales|comic books|movies|documentaries|theater|opera|ballet|jazz|classical music|rock music|hip hop|guitars|pianos|violins|drums|painting|sculpture|photography|architecture|fashion|jewelry|pottery|knitting|sewing|woodworking|chess|board games|video games|soccer|basketball|baseball|tennis|golf|cricket|hockey|the Olympics|cycling|hiking|camping|fishing|sailing|surfing|skiing|traveling|hotels|airports|trains|ships|bridges|tunnels|skyscrapers|cities|villages|schools|universities|teachers|libraries|museums|hospitals|doctors|nurses|firefighters|farmers|engineers|scientists|mathematics|algebra|geometry|calculus|statistics|probability|prime numbers|fractions|the Pythagorean theorem|computers|programming|algorithms|data structures|databases|operating systems|networks|the internet|web browsers|email|encryption|passwords|cybersecurity|machine learning|neural networks|artificial intelligence|robots|drones|self-driving cars|virtual reality|smartphones|social media|podcasts|e-books|open source software|cloud computing|version control|software testing|debugging|recursion|sorting|hash tables|linked lists|binary trees|graphs|regular expressions|APIs|JSON|HTML|CSS|JavaScript|Python|Java|C++|Rust|Go|SQL|Linux|Docker|compilers|friendship|kindness|honesty|courage|patience|gratitude|happiness|love|family|parenting|children|birthdays|weddings|holidays|New Year|gifts|letters|neighbors|moving to a new home|cleaning|laundry|cooking for beginners|healthy breakfast|packing a suitcase|learning a language|reading more books|saving money|buying a car|adopting a pet|planting a tree|the seasons|rain|snow|thunderstorms|hurricanes|clouds|rainbows|the moon|tides|time zones|calendars|clocks|maps|compasses|the periodic table|atoms|molecules|acids and bases|chemical reactions|water|oxygen|carbon|iron|gold|glass|plastic|concrete|cotton|silk|leather|rubber|soap|paint|ink
""".strip().replace("\n", "|").split("|")

TEMPLATES = """
What is {t}?|What are the main facts about {t}?|Explain {t} in simple terms.|Explain {t} to a ten year old.|Explain how {t} works, step by step.|Give me a short introduction to {t}.|Tell me about {t}.|Tell me something interesting about {t}.|Why does {t} matter?|Why is {t} important?|What is the history of {t}?|Describe {t} in one paragraph.|Describe {t} in two sentences.|Summarize what is known about {t}.|Write a summary of {t} in three sentences.|List five facts about {t}.|List ten things to know about {t}.|List three advantages and three disadvantages of {t}.|Give me a bulleted list of tips about {t}.|Give 7 examples related to {t}.|What are common misconceptions about {t}?|What are the benefits of {t}?|What are the risks of {t}?|How has {t} changed over time?|How do people use {t} today?|How can I learn more about {t}?|How would you teach {t} to beginners?|What questions should I ask about {t}?|Write a poem about {t}.|Write a haiku about {t}.|Write a short story about {t}.|Write a funny story about {t} and a robot.|Write the opening of a novel about {t}.|Write a song about {t}.|Write a dialogue between two friends about {t}.|Write a limerick about {t}.|Write a news article about {t}.|Write a blog post about {t}.|Write an essay about {t}.|Write a letter to a friend about {t}.|Write an email to my boss about {t}.|Write a product description for something related to {t}.|Write a tweet about {t}.|Write a quiz with answers about {t}.|Write three multiple choice questions about {t}.|Make a lesson plan about {t}.|Make a table comparing two aspects of {t}.|Compare {t} and {u}.|What is the difference between {t} and {u}?|How are {t} and {u} related?|Which is more important, {t} or {u}? Explain your reasoning.|Imagine a world without {t}. What would change?|What would happen if {t} disappeared?|I am confused about {t}. Can you help me?|I need advice about {t}.|Can you recommend something about {t}?|Hi! Let's talk about {t}.|My friend asked me about {t} and I didn't know what to say. What should I tell them?|I'm giving a talk about {t}. Help me write an outline.|Define {t}.|What does the phrase "{t}" mean?|Give a definition and an example of {t}.|Who first studied or invented {t}?|Where can you find {t}?|When did people first learn about {t}?|Is {t} good or bad? Explain.|What is the future of {t}?|What are the key terms used with {t}?|Write a Python class that models {t}.|Write a Python program that stores information about {t}.|Write a SQL query for a table about {t}.|Write a JSON object describing {t}.|Write an HTML page about {t}.|Translate this sentence to French: I like to read about {t}.|Translate to Spanish: "{t} is very interesting."|Translate into German: We talked about {t} yesterday.|Translate into Italian: She knows a lot about {t}.|How do you say "{t}" in Spanish?|Rewrite this sentence in a formal tone: {t} is pretty cool.|Correct the grammar: he don't knows nothing about {t}.|Create a slogan about {t}.|Brainstorm names for a club about {t}.|Give me a riddle about {t}.|Tell me a joke about {t}.|Pretend you are an expert in {t} and answer a beginner's question.|You are a journalist. Interview someone about {t}.|What are the steps to get started with {t}?|Create a checklist for {t}.|Outline the causes and effects of {t}.|Argue for and against {t}.|Give me a detailed technical explanation of {t}.|What role does {t} play in everyday life?|What should every student know about {t}?
""".strip().replace("\n", "|").split("|")

CODE_TASKS = """
reverse a string|check if a number is prime|compute the factorial of a number|compute the nth Fibonacci number|sort a list of numbers|find the largest number in a list|find the smallest element|remove duplicates from a list|count the words in a text|count the vowels in a string|check if a word is a palindrome|merge two sorted lists|binary search a sorted array|compute the greatest common divisor|convert Celsius to Fahrenheit|read a file line by line|write a list to a file|parse a CSV file|parse a JSON string|download a web page|send an email|connect to a database|compute the average of a list|compute the median|compute the standard deviation|transpose a matrix|multiply two matrices|flatten a nested list|group items by key|count the frequency of each character|generate random passwords|validate an email address|validate a phone number|implement a stack|implement a queue|implement a linked list|implement a binary tree|traverse a graph breadth first|traverse a graph depth first|find the shortest path|implement a simple calculator|implement a to-do list|implement a bank account|implement a timer|implement a cache|implement bubble sort|implement quicksort|implement merge sort|implement insertion sort|draw a triangle of stars|print the multiplication table|convert a number to binary|convert a number to Roman numerals|check for balanced parentheses|find anagrams|find the longest word|capitalize every word|replace spaces with dashes|split a string by commas|format a date|compute the difference between two dates|list the files in a directory|rename files|compress a file|plot a line chart|train a linear regression|compute a dot product|normalize a vector|simulate a coin toss|simulate dice rolls|shuffle a deck of cards|play rock paper scissors|guess a number|solve a quadratic equation|sum the digits of a number|check if a year is a leap year|find the second largest number|rotate an array|find the intersection of two lists|zip two lists into a dictionary|invert a dictionary|filter even numbers|square every number|compute powers of two|count down from ten|log messages to a file|retry a failing function|measure running time|make an HTTP request|build a REST endpoint|hash a password|encode text in base64
""".strip().replace("\n", "|").split("|")
CODE_TEMPLATES = """
Write a {l} function to {c}.|Write a {l} program to {c}.|Write {l} code to {c} and explain it.|How do I {c} in {l}?|Show me how to {c} using {l}.|Give me a short {l} example to {c}.|Write a unit test for a {l} function to {c}.|Complete this: write {l} code to {c} with comments.|What is the fastest way to {c} in {l}?|I have a bug in my {l} code that should {c}. What could be wrong?|Write a {l} one-liner to {c}.
""".strip().replace("\n", "|").split("|")
LANGS = ["Python"] * 6 + ["JavaScript"] * 2 + ["Java", "C", "C++", "Rust", "Go", "Ruby", "Bash", "TypeScript", "C#", "PHP"]
CODE_OPENINGS = """
def {f}({a}):
|def {f}({a}):
    \"\"\"|def {f}({a}) -> int:
    |class {F}:
    def __init__(self, {a}):
|import os
import sys

def {f}({a}):
|import numpy as np

def {f}({a}):
|function {f}({a}) {{
|const {f} = ({a}) => {{
|public class {F} {{
    public static void main(String[] args) {{
|#include <stdio.h>

int {f}(int {a}) {{
|fn {f}({a}: i32) -> i32 {{
|SELECT {a}, COUNT(*) FROM {f}
|# {f}: 
""".strip("\n").split("|")
NAMES = "load_data save_file get_user parse_args compute_sum find_max is_valid read_config build_index process_items update_state send_request handle_event merge_lists count_words sort_values filter_rows render_page draw_shape train_model predict evaluate tokenize encode decode compress hash_key insert_node delete_node search main run start stop connect close format_date convert validate check_password open_window add_item remove_item print_table".split()
ARGS = "x|n|a, b|items|data|path|values|self|name, age|text|left, right|key, value|nums|word|matrix|config|url|user".split("|")

SUBJ = "I|You|We|They|My brother|My sister|The teacher|The doctor|Our neighbor|The children|The old man|A young woman|The company|The president|My best friend|The scientist|The cook|The driver|The artist|Her mother".split("|")
VERB = "bought a new car|went to the market|opened the window|lost the keys|read an interesting book|wrote a long letter|cooked dinner|missed the train|found a small dog|visited the museum|learned to swim|called the police|sold the house|planted a garden|played the piano|watched a movie|forgot the password|drank cold water|painted the door|fixed the bicycle|wants to travel|likes apples|is very tired|will arrive tomorrow|has a question|needs some help|speaks three languages|works in a hospital|lives near the river|is looking for a job".split("|")
WHEN = "|yesterday|last week|this morning|in the evening|on Sunday|after work|before breakfast|in the summer|with a friend|because it was raining".split("|")
TRANS = """
Translate to {g}: {s}.|Translate the following sentence into {g}: "{s}."|How do you say "{s}" in {g}?|Please translate this into {g}.

{s}.|What is the {g} translation of "{s}"?|{s}. Say that in {g}.
""".strip().split("|")
GLANGS = "French|Spanish|German|Italian|Portuguese|Dutch|Japanese|Chinese|Russian|Latin|Swedish|Polish".split("|")

PEOPLE = "Tom Anna Maria John Sara Ahmed Wei Priya Carlos Emma Liam Olga Kofi Yuki Nina Paul".split()
THINGS = "apples pencils books marbles coins cookies stamps tickets oranges balloons stickers cards eggs flowers shells toys".split()
MATH = """
{p} has {a} {o} and buys {b} more. How many {o} does {p} have now?|{p} has {a} {o} and gives {b} of them to {q}. How many are left?|{p} reads {b} pages a day. How many days does a book of {a} pages take?|If {b} {o} cost {a} dollars, how much does one cost?|A train travels {a} miles in {b} hours. What is its average speed?|What is {a} plus {b}?|What is {a} times {b}?|What is {a} minus {b}? Show your steps.|What is {b} percent of {a}?|Solve for x: {b}x + {b} = {a}.|{p} is {b} years older than {q}. {q} is {a}. How old is {p}?|All {o} are red. This thing is one of the {o}. What color is it? Explain.|Which is larger, {a}/{b} or {b}? Think step by step.|{p} is taller than {q}, and {q} is taller than {r}. Who is the shortest?|A rectangle is {a} cm long and {b} cm wide. What is its area?|There are {a} students in {b} classes. How many students are in each class?|What comes next in the sequence {b}, {c}, {d}, ...?
""".strip().split("|")

CHAT = """
Hello!|Hi there, how are you?|Good morning!|What's your name?|Who made you?|What can you do?|Can you help me with my homework?|I'm bored. What should I do?|I feel sad today.|I can't sleep. Any advice?|I had an argument with my friend.|Tell me a joke.|Tell me a story.|What's your favorite color?|What should I cook tonight?|How can I be more productive?|I have a job interview tomorrow. Any tips?|Can you recommend a good book?|What movie should I watch?|Help me plan a weekend trip.|Help me plan a birthday party.|How do I make new friends?|How do I stop procrastinating?|Give me some motivation.|What is the meaning of life?|I want to lose weight. Where should I start?|I want to learn to play the guitar.|My computer is slow. What can I do?|My phone won't turn on.|How do I remove a coffee stain?|How do I write a cover letter?|I need a gift idea for my mother.|Should I buy or rent a house?|How do I save more money?|What are some good habits?|Thank you for your help!|Can you explain that again?|What do you think about that?|Tell me more.|Why?
""".strip().split("|")
FOLLOW = """
Can you give me an example?|Summarize that in one sentence.|Summarize your answer in three bullet points.|Can you explain that in simpler terms?|Make it shorter.|Make it longer and more detailed.|Rewrite that in a friendlier tone.|Translate your answer into French.|Translate that into Spanish.|Why is that?|Tell me more.|What else should I know?|Thanks! Can you list the key points?|Are you sure?|Turn that into a poem.|Turn that into a list.|Can you write that as a table?|What is the most important part?|Write some Python code related to that.|Explain the last part again.|Now write a title for it.|Give me three questions about it.|What are the pros and cons?|How would I explain this to a child?|Continue.|Thank you!|Rewrite it in a formal style.|Who is this useful for?
""".strip().split("|")

RAW = """
{T} is|{T} are|The history of {t}|In recent years, {t}|One of the most important things about {t} is|# {T}

|## Introduction to {T}

|{T}: A Beginner's Guide

|Once upon a time, there was|It was a dark and stormy night when|"{T}," she said,|Chapter 1

|Question: What is {t}?
Answer:|Q: Why is {t} important?
A:|The following article describes {t}.|Researchers have found that {t}|Here are some tips about {t}:

1.|Abstract

We present a study of {t}.|Dear Sir or Madam,

|Recipe: {T}

Ingredients:
|Lesson 1: {T}

|According to experts, {t}|When I was a child, {t}|The best way to understand {t} is
""".strip("\n").split("|")

SYSTEMS = ["You are a helpful AI assistant named SmolLM, trained by Hugging Face"] * 6 + [
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "You are a friendly chatbot.",
    "You are an expert programmer.", "You are a translator.", "You are a concise assistant that answers in one sentence.",
    "You are a creative writer.", "You are a patient teacher."]


def user_prompt(r):
    k = r.random()
    t, u = r.sample(TOPICS, 2)
    if k < 0.50:
        return r.choice(TEMPLATES).format(t=t, u=u)
    if k < 0.66:
        return r.choice(CODE_TEMPLATES).format(l=r.choice(LANGS), c=r.choice(CODE_TASKS))
    if k < 0.74:
        return "Complete this code:\n" * (r.random() < 0.5) + code_opening(r)
    if k < 0.84:
        s = " ".join(x for x in (r.choice(SUBJ), r.choice(VERB), r.choice(WHEN)) if x)
        return r.choice(TRANS).format(g=r.choice(GLANGS), s=s)
    if k < 0.93:
        b = r.randint(2, 20)
        p, q, w = r.sample(PEOPLE, 3)
        return r.choice(MATH).format(p=p, q=q, r=w, o=r.choice(THINGS), a=r.randint(10, 400), b=b, c=b * 2, d=b * 3)
    if k < 0.97:
        return r.choice(CHAT)
    return r.choice(TEMPLATES).format(t=t, u=u) + " " + r.choice(
        ["Keep it short.", "Be detailed.", "Use simple words.", "Answer in one sentence.", "Use bullet points.", "Think step by step."])


def code_opening(r):
    f = r.choice(NAMES)
    return r.choice(CODE_OPENINGS).format(f=f, F=f.title().replace("_", ""), a=r.choice(ARGS))


def stdlib_snippets(r, n, chars=(60, 240)):
    """Openings cut from the running Python's own library, as raw code/text prefixes."""
    files = glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "**", "*.py"), recursive=True)
    files = [f for f in files if "site-packages" not in f and "/test" not in f]
    texts = []
    for f in files:
        try:
            s = open(f, encoding="utf8").read()
        except (OSError, UnicodeDecodeError):
            continue
        if len(s) > 600:
            texts.append(s)
    out = []
    while texts and len(out) < n:
        s = r.choice(texts)
        i = r.randrange(0, len(s) - 300)
        i = s.find("\n", i) + 1
        out.append(s[i:i + r.randint(*chars)])
    return out


def chat(q, system=None, lead=""):
    """A chat up to where the answer begins."""
    s = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{lead}{s}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n"


def build_pool(n_start=200_000, n_follow=60_000, seed=1):
    """-> starts, follows: lists of (text, kind). kind 0 = the assistant speaks next,
    1 = the *user* turn is left for the target to invent, 2 = raw text."""
    r = random.Random(seed)
    snippets = stdlib_snippets(r, n_start // 20)
    starts = []
    for i in range(n_start):
        k = r.random()
        if k < 0.50:
            starts.append((chat(user_prompt(r)), 0))
        elif k < 0.63:
            starts.append((chat(user_prompt(r), r.choice(SYSTEMS)), 0))
        elif k < 0.83:
            starts.append((USER_TURN.lstrip(), 1))
        elif k < 0.86:
            starts.append((f"<|im_start|>system\n{r.choice(SYSTEMS)}<|im_end|>\n<|im_start|>user\n", 1))
        elif k < 0.94:
            t = r.choice(TOPICS)
            starts.append((r.choice(RAW).format(t=t, T=t[0].upper() + t[1:]), 2))
        elif k < 0.97 or not snippets:
            starts.append((code_opening(r), 2))
        else:
            starts.append((r.choice(snippets), 2))
    follows = []
    for i in range(n_follow):
        k = r.random()
        if k < 0.35:
            follows.append((USER_TURN, 1))
        elif k < 0.55:
            follows.append((chat(r.choice(FOLLOW), lead="\n"), 0))
        else:
            follows.append((chat(user_prompt(r), lead="\n"), 0))
    return starts, follows


# Held out: none of these strings is produced by the templates above.
EVAL = json.loads((pathlib.Path(__file__).parent / "eval_prompts.json").read_text(encoding="utf8"))
